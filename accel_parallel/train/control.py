"""What is wanted from this process while it trains, and what is told of it: requests to stop, and the step it is at."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType


class Control:
    """Stop requests in, the current step out.

    SIGTERM, SIGUSR1, SIGHUP and SIGINT ask, and a second SIGINT ends at once. Under our launcher there are files in
    `directory` besides: `stop` appears when somebody asks, `step-<rank>` holds the step.
    """

    def __init__(self, directory: Path | None = None, rank: int = 0) -> None:
        self.step: int | None = 0
        """The optimizer step being computed, counted from 1; 0 before training begins, None if nobody counts."""
        self._flag = directory / "stop" if directory else None
        self._step_file = os.open(directory / f"step-{rank}", os.O_CREAT | os.O_WRONLY) if directory else None
        self._signal: int | None = None
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def install(self) -> None:
        """Take signals as requests: a cluster's scheduler sends them to every process of a job."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._note)

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def begin(self, step: int) -> None:
        """Optimizer step `step` begins."""
        self.step = step
        if self._step_file is not None:
            # 20 characters, so that a longer number is never left behind a shorter one.
            os.pwrite(self._step_file, b"%20d" % step, 0)

    def stop_asked(self) -> bool:
        """Whether this process was asked to stop; the processes agree on it, see `Runtime.agree`."""
        return self._signal is not None or (self._flag is not None and self._flag.exists())

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number
