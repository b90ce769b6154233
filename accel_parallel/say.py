"""One line for a person, on the standard error."""

import os
import sys


def say(text: str) -> None:
    """Print it. A line that cannot be written, on a full disk or to a closed pipe, is no reason to stop training."""
    if sys.stderr is None:  # started with it closed
        return
    try:
        print(text, file=sys.stderr, flush=True)  # noqa: T201
    except (OSError, ValueError):
        # What is still buffered would fail again, at the next line and at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
