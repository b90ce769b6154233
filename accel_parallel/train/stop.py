"""Orderly stops: somebody asked, and training ends after a checkpoint."""

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType


class StopRequest:
    """Becomes true when this process gets SIGTERM, SIGUSR1 or SIGINT, or when the file `flag` appears.

    The processes agree on it where they exchange their numbers anyway; a second SIGINT ends at once.
    """

    def __init__(self, flag: Path | None = None) -> None:
        self._flag = flag
        self._signal: int | None = None
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._note)

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self._signal is not None or (self._flag is not None and self._flag.exists())

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number
