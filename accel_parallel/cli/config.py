"""`accel-parallel config`: the specification rendered to one Accelerate YAML file per strategy, or compared."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from accel_parallel.accelerate_yaml import GENERATED, render_file
from accel_parallel.errors import Problem, RunError, SpecError
from accel_parallel.files import write_atomic
from accel_parallel.spec import Draft, RunSpec, dump_spec, find_spec, read_spec
from accel_parallel.spec.load import DEFAULT_PATH
from accel_parallel.strategies import CATALOGUE, Strategy

State = Literal["written", "unchanged", "stale", "missing", "refused", "skipped"]


@dataclass(frozen=True)
class FileResult:
    """What became of one file. `diff` is what `--check` would have changed."""

    path: Path
    state: State
    diff: str = ""
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class ConfigResult:
    """What became of all files; `exit_code` is 2 if one could not be rendered, 1 if `--check` found a difference."""

    spec: Path
    files: tuple[FileResult, ...]

    @property
    def problems(self) -> list[Problem]:
        found = [problem for file in self.files for problem in file.problems]
        # What is wrong for all strategies is told by those that take the specification as it is.
        return [problem for problem in found if problem.severity == "error"] or found

    @property
    def exit_code(self) -> int:
        states = {file.state for file in self.files}
        return 2 if "refused" in states else 1 if states & {"stale", "missing"} else 0

    def to_dict(self) -> dict[str, object]:
        """What `--json` prints as `data`."""
        return {
            "spec": str(self.spec),
            "files": [{"path": str(file.path), "state": file.state, "diff": file.diff} for file in self.files],
        }

    def lines(self) -> list[str]:
        """The report for standard output; the problems are not in it, they belong on standard error."""
        report = []
        for file in self.files:
            if file.state != "refused":
                report.append(f"{file.state:9}  {file.path}")
            report += file.diff.splitlines()
        return report


def write_configs(
    spec_path: Path | None = None, sets: Iterable[str] = (), out: Path | None = None, check: bool = False
) -> ConfigResult:
    """Render every strategy to `<out>/<name>.yaml`; `out` is the specification's folder unless given.

    Without a specification anywhere, one with the defaults is written first. With `check` nothing is written.
    A strategy that the specification does not allow is refused alone; the others are still written. One that only
    its name brings in conflict with the specification (four processes where the batch divides by two) is skipped.
    Raises SpecError when the specification itself is wrong, RunError when the folder cannot be written.
    """
    path = find_spec(spec_path)
    draft = read_spec(path, sets)
    draft.resolve()
    folder = out or (path or DEFAULT_PATH).parent
    files: list[FileResult] = []
    if path is None:
        path = DEFAULT_PATH
        files.append(_put(path, dump_spec(RunSpec(), comments=True), check))
    files += [
        _strategy_file(draft, strategy, folder / f"{strategy.name}.yaml", path.name, check) for strategy in CATALOGUE
    ]
    return ConfigResult(path, tuple(files))


def _strategy_file(draft: Draft, strategy: Strategy, path: Path, source: str, check: bool) -> FileResult:
    try:
        text = render_file(strategy.resolve(draft), strategy, source=source)
    except SpecError as error:
        if not strategy.pins_fsdp:
            return FileResult(path, "refused", problems=tuple(error.problems))
        there = path.exists()
        hint = "what is there is of an earlier specification: remove it" if there else "nothing is written"
        said = (replace(p, severity="warning", path=str(path), hint=hint) for p in error.problems)
        return FileResult(path, "stale" if check and there else "skipped", problems=tuple(said))
    return _put(path, text, check)


def _put(path: Path, text: str, check: bool) -> FileResult:
    """Bring one file up to date, or say what is missing. A file that somebody wrote by hand is left alone."""
    try:
        old = path.read_text(encoding="utf-8") if path.exists() else None
        if old == text:
            return FileResult(path, "unchanged")
        if check:
            return FileResult(path, "missing" if old is None else "stale", _diff(path, old or "", text))
        if old is not None and GENERATED not in old:
            message = "was not written by accel-parallel config; left as it is"
            problem = Problem(message, code="config-foreign-file", path=str(path), hint="move it away, or choose --out")
            return FileResult(path, "refused", problems=(problem,))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RunError(f"cannot write {path}: {reason}", hint="choose another folder with --out") from None
    return FileResult(path, "written")


def _diff(path: Path, old: str, new: str) -> str:
    from difflib import unified_diff

    lines = unified_diff(old.splitlines(), new.splitlines(), f"{path} (on disk)", f"{path} (generated)", lineterm="")
    return "".join(f"{line}\n" for line in lines)
