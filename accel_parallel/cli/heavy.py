"""A verb whose work needs torch: a child process does it, with the words that were typed."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

SECONDS_TO_CLEAR_UP = 10


def run_heavy(module: str, words: Sequence[str]) -> NoReturn:
    """Run `python -m accel_parallel.train.<module>`, which prints its result itself, and end with its exit code."""
    child = subprocess.Popen([sys.executable, "-m", f"accel_parallel.train.{module}", *words])
    try:
        code = child.wait()
    except KeyboardInterrupt:
        # The terminal told the child as well.
        try:
            child.wait(SECONDS_TO_CLEAR_UP)
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            child.terminate()
            child.wait()
        code = -signal.SIGINT
    sys.exit(code if code >= 0 else 128 - code)
