"""One launch at a time in a run directory."""

from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from accel_parallel.errors import RunError

Lock = BaseFileLock
LAUNCHER, WORKERS = ".launch", ".lock"
"""Held by `accel-parallel launch` while it runs, and by the main worker of any launcher while it trains."""


def hold(run: Path, name: str) -> BaseFileLock:
    """Keep every other launch out of the directory until the lock is released or this process ends.

    Raises RunError if another is in it.
    """
    lock = FileLock(run / name)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        hint = "wait for it, or start another with --fresh"
        raise RunError(f"another launch is running in {run}", hint=hint) from None
    except OSError as error:
        raise RunError(f"cannot write to {run}: {error.strerror}", hint="name another directory with --run") from None
    return lock


def hold_as_launcher(run: Path) -> BaseFileLock:
    """The launcher's lock, if no worker of another launcher trains there. Raises RunError like `hold`."""
    lock = hold(run, LAUNCHER)
    try:
        hold(run, WORKERS).release()
    except RunError:
        lock.release()
        raise
    return lock
