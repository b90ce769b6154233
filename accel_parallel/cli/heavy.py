"""A verb whose work needs torch: a child process does it, with the words that were typed."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn


def run_heavy(module: str, words: Sequence[str]) -> NoReturn:
    """`call_heavy` a module that prints its result itself, and end with its exit code."""
    code = call_heavy(module, words)
    sys.exit(code if code >= 0 else 128 - code)


def call_heavy(module: str, words: Sequence[str], **options: Any) -> int:
    """Run `python -m accel_parallel.train.<module>`; its exit code, or minus the signal that ended it.

    `options` are those of `subprocess.Popen`.

    Interrupted or told to end, it first waits until the child has ended, who clears up.
    """
    child = _start(module, words, **options)
    with _ending(child):
        return child.wait()


def heavy_answer(module: str, words: Sequence[str]) -> tuple[bytes, int]:
    """What `python -m accel_parallel.train.<module>` printed on its standard output, and its exit code."""
    child = _start(module, words, stdout=subprocess.PIPE)
    with _ending(child):
        printed, _ = child.communicate()
    return printed, child.returncode


def _start(module: str, words: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    signal.signal(signal.SIGTERM, _end)
    # Inherited: in the child Ctrl-C would be a traceback while it still imports. SIGTERM ends it at any time.
    answer = signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-m", f"accel_parallel.train.{module}", *words], **options)
    signal.signal(signal.SIGINT, answer)
    return child


@contextmanager
def _ending(child: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Whatever ends this process while it waits inside ends the child first."""
    try:
        yield
    except BaseException:
        child.terminate()
        child.wait()
        raise


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
