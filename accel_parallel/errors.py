"""Errors a user can cause. Each prints as one line and carries the process's exit code.

AccelParallelError           exit 2
├── SpecError                a specification or an override is wrong; holds every problem found
├── DataError                text, recipe or tokenizer cannot be used
├── RunError                 a run directory, a checkpoint or the disk
├── LaunchError              processes, devices, ports
├── ModelError               a model that was named cannot be built
├── TrainingError            training itself cannot go on (a loss that is not finite)
└── MismatchError            exit 1: what runs is not what was asked for
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Problem:
    """One finding, in the form every `--json` output uses.

    `path` is the file (or the option, such as `--set training.lr`), `line` counts from 1.
    """

    message: str
    code: str = "error"
    severity: Severity = "error"
    path: str | None = None
    line: int | None = None
    hint: str | None = None

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}: " if self.path and self.line else f"{self.path}: " if self.path else ""
        return f"{where}{self.message}" + (f" ({self.hint})" if self.hint else "")

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


class AccelParallelError(Exception):
    """Base of all. `str()` is the line to show; `hint` says what to do about it."""

    exit_code = 2
    code = "error"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    @property
    def problems(self) -> list[Problem]:
        return [Problem(self.message, code=self.code, hint=self.hint)]


def of_the_system(error: OSError) -> AccelParallelError:
    """What the operating system refused, as one line: for files that no better message is known for."""
    where = f"{str(error.filename)[:200]}: " if error.filename else ""
    return AccelParallelError(f"{where}{error.strerror or error}")


class SpecError(AccelParallelError):
    """The specification is wrong; `problems` lists everything that is, not only the first."""

    code = "spec"

    def __init__(self, problems: Iterable[Problem]) -> None:
        self._problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self._problems))

    @property
    def problems(self) -> list[Problem]:
        return self._problems


class DataError(AccelParallelError):
    """The text, the recipe or the tokenizer cannot be used."""

    code = "data"


class RunError(AccelParallelError):
    """A run directory, a checkpoint or the disk stands in the way."""

    code = "run"


class LaunchError(AccelParallelError):
    """Processes, devices or ports do not allow the launch."""

    code = "launch"


class ModelError(AccelParallelError):
    """A model of the user's cannot be imported or built."""

    code = "model"


class TrainingError(AccelParallelError):
    """Training cannot go on, for example because a loss is not finite; `step` is where, if it is known."""

    code = "training"

    def __init__(self, message: str, *, hint: str | None = None, step: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.step = step


class MismatchError(AccelParallelError):
    """What runs is not what the launch asked for."""

    exit_code = 1
    code = "mismatch"
