"""A verb whose work needs torch: a child process does it, with the words that were typed."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn


def run_heavy(module: str, words: Sequence[str]) -> NoReturn:
    """`call_heavy` a module that prints its result itself, and end with its exit code."""
    code = call_heavy(module, words)
    sys.exit(code if code >= 0 else 128 - code)


def call_heavy(module: str, words: Sequence[str]) -> int:
    """Run `python -m accel_parallel.train.<module>`; its exit code, or minus the signal that ended it.

    Interrupted or told to end, it first waits until the child has ended, who clears up.
    """
    signal.signal(signal.SIGTERM, _end)
    # Inherited: in the child Ctrl-C would be a traceback while it still imports. SIGTERM ends it at any time.
    answer = signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-m", f"accel_parallel.train.{module}", *words])
    signal.signal(signal.SIGINT, answer)
    try:
        return child.wait()
    except BaseException:
        child.terminate()
        child.wait()
        raise


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
