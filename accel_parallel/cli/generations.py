"""What a launch leaves and says between its generations: the line, the traceback, the event among the metrics."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from accel_parallel.checkpoints import newest_step
from accel_parallel.ended import Ended
from accel_parallel.errors import Problem, RunError
from accel_parallel.files import write_atomic
from accel_parallel.metrics import open_lines, to_line
from accel_parallel.restarts import Restart
from accel_parallel.runs import Run


@dataclass(slots=True)
class Training:
    """The training loop in a run directory, on one of the machines."""

    run: Run
    steps: int
    machine_rank: int
    say: Callable[[str], None]
    traces: list[str] = field(default_factory=list)
    """Of the generations of this launch, each with what came after it."""

    def again(self, restart: Restart) -> bool:
        """Say what happened and where the next generation goes on; false if the last checkpoint was written before."""
        problems, step = self.problems(restart.ended), newest_step(self.run.path)
        if step >= self.steps:
            self.say(f"{'; '.join(map(str, problems))}; nothing is left to do")
            return False
        line = restart.line(problems, f"goes on from {f'step-{step:08d}' if step else 'the start'}")
        if restart.ended.traceback:
            self.traces.append(f"{line}\n\n")
        self.say(line)
        if self.machine_rank == 0:
            self._record(restart, line, step)
        return True

    def problems(self, ended: Ended) -> list[Problem]:
        """Those to be shown. The traceback is kept in the run directory, below those of earlier generations."""
        if not ended.traceback:
            return ended.problems
        name = f"traceback-{self.machine_rank}.txt" if self.machine_rank else "traceback.txt"
        self.traces.append(ended.traceback)
        write(self.run.path / name, "".join(self.traces))
        return [replace(problem, hint=f"traceback in {self.run.path / name}") for problem in ended.problems]

    def _record(self, restart: Restart, line: str, step: int) -> None:
        event = {"step": step, "event": "restart", "number": restart.number, "message": line, "time": time.time()}
        try:
            with open_lines(self.run.metrics) as file:
                file.write(to_line("event", event) + "\n")
        except OSError as error:
            raise RunError(f"cannot write {self.run.metrics}: {error.strerror}") from None


def start_script_again(restart: Restart, say: Callable[[str], None]) -> bool:
    """Say what happened to the script. What it goes on from is its own affair."""
    say_trace(restart.ended, say)
    say(restart.line(restart.ended.problems, "starts the script again"))
    return True


def say_trace(ended: Ended, say: Callable[[str], None]) -> None:
    if ended.traceback:
        say(ended.traceback.rstrip("\n"))


def write(path: Path, text: str) -> None:
    """Replace a small file. Raises RunError when that cannot be done."""
    try:
        write_atomic(path, text)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from None
