"""Where the numbers of a run go: metrics.jsonl, the progress bar, trackers. Only the main process writes."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from accel_parallel.errors import RunError
from accel_parallel.files import write_atomic
from accel_parallel.metrics import by_step, format_gib, format_tokens_per_sec, open_lines, read_lines, to_line
from accel_parallel.runs import Run
from accel_parallel.say import say
from accel_parallel.train.checkpoint import Saved
from accel_parallel.train.meter import Reading
from accel_parallel.train.state import TrainState


class Reporter:
    """Collects a run's lines. On processes other than the main one everything is a no-op."""

    def __init__(
        self,
        run: Run,
        *,
        total_steps: int,
        active: bool,
        track: Callable[[dict[str, Any], int], None],
        environment: Callable[[], dict[str, Any]],
    ) -> None:
        self._run = run
        self._active = active
        self._track = track
        self._environment = environment
        self._file: TextIO | None = None
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._total = total_steps
        self._unigram_entropy = 0.0

    def __enter__(self) -> Self:
        if self._active:
            self._file = self._open()
            console = Console(stderr=True)
            if console.is_terminal:
                self._bar = Progress(
                    TextColumn("step {task.completed}/{task.total}"),
                    BarColumn(bar_width=None),
                    TextColumn("{task.fields[numbers]}"),
                    TimeRemainingColumn(compact=True),
                    console=console,
                    expand=True,
                )
                self._task = self._bar.add_task("", total=self._total, numbers="")
                self._bar.start()
        return self

    def _open(self) -> TextIO:
        try:
            return open_lines(self._run.metrics)
        except OSError as error:
            raise RunError(f"cannot write {self._run.metrics}: {error.strerror}") from None

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._file is not None:
            # A full disk was reported where a line did not fit.
            with suppress(OSError):
                self._file.close()

    def say(self, text: str) -> None:
        """One line for a person, above the progress bar."""
        if not self._active:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            say(text)

    def line(self, kind: str, values: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl, and give its numbers to the trackers."""
        if self._file is not None:
            try:
                self._file.write(to_line(kind, {**values, "time": time.time()}) + "\n")
            except OSError as error:
                raise RunError(f"cannot write {self._run.metrics}: {error.strerror}") from None
        if "step" in values:
            numbers = {f"{kind}/{key}": value for key, value in values.items() if _is_number(value) and key != "step"}
            self._track(numbers, values["step"])

    def start(self, state: TrainState, unigram_entropy: float) -> None:
        """The model is prepared and checked, and training goes on from `state`."""
        self._unigram_entropy = unigram_entropy
        if self._active:
            try:
                write_atomic(self._run.path / "environment.json", json.dumps(self._environment(), indent=1) + "\n")
            except OSError as error:
                raise RunError(f"cannot write to {self._run.path}: {error.strerror}") from None
        if state.step:
            self.say(f"continues at step {state.step} of {self._total}")

    def train(self, state: TrainState, reading: Reading, lr: float) -> None:
        values = {"step": state.step, "tokens": state.tokens, "lr": lr, **asdict(reading)}
        self.line("train", values)
        numbers = (
            f"loss {reading.loss:.4f}  lr {lr:.2e}  "
            f"{format_tokens_per_sec(reading.tokens_per_sec)}  {format_gib(reading.peak_memory_gib)}"
        )
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=state.step, numbers=numbers)
        else:
            self.say(f"step {state.step}/{self._total}  {numbers}")

    def evaluation(self, state: TrainState, loss: float) -> None:
        self.line("eval", {"step": state.step, "loss": loss, "unigram_entropy": self._unigram_entropy})
        self.say(f"step {state.step}: validation loss {loss:.4f}, unigram entropy {self._unigram_entropy:.4f}")

    def saved(self, saves: list[Saved]) -> None:
        for save in saves:
            self.line("save", {**asdict(save), "path": save.path.name})

    def losses(self, step: int) -> tuple[float | None, float | None]:
        """The first and the last train loss up to `step`, earlier launches included."""
        rows = by_step(read_lines(self._run.metrics), "train").items()
        losses = [row["loss"] for at, row in rows if at <= step and _is_number(row.get("loss"))]
        return (losses[0], losses[-1]) if losses else (None, None)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
