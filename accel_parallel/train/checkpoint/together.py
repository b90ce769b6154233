"""Steps that may fail on some of the processes: then all raise the same error, and none waits for the others."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import distributed

from accel_parallel.errors import AccelParallelError, RunError

T = TypeVar("T")
NEARLY_FULL_BYTES = 4 * 2**20


class Together:
    """The processes of `group`, None for a single one. `folder` is on the disk that is written to or read."""

    def __init__(self, group: distributed.ProcessGroup | None, folder: Path) -> None:
        self.group = group
        self.folder = folder

    @property
    def rank(self) -> int:
        return distributed.get_rank(self.group) if self.group else 0

    @property
    def size(self) -> int:
        return distributed.get_world_size(self.group) if self.group else 1

    def gather(self, value: T) -> list[T]:
        """Collective. One small picklable object per process, in rank order, on every process."""
        if self.group is None:
            return [value]
        values: list[T] = [value] * self.size
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def do(self, doing: str, body: Callable[[], T]) -> T:
        """Collective. What `body` returned here, once it has ended everywhere.

        Raises RunError on all, naming the first rank on which it failed.
        """
        result: Any = None
        reason, cause = None, None
        try:
            result = body()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # DCP's CheckpointException is no Exception
            reason, cause = reason_of(error, self.folder), error
        failed = [(rank, said) for rank, said in enumerate(self.gather(reason)) if said is not None]
        if failed:
            rank, said = failed[0]
            raise RunError(f"{doing}: {said} (rank {rank})") from cause
        return result


def reason_of(error: BaseException, folder: Path) -> str:
    """The operating system's or our own words; DCP wraps the cause of each rank."""
    failures = getattr(error, "failures", None)
    if failures:
        first = next(iter(failures.values()))
        error = first[0] if isinstance(first, tuple) else first
    if isinstance(error, AccelParallelError):
        return str(error)
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    text = str(error).strip().splitlines()
    # torch's serializer says in many ways that a write came back short; the file system knows why.
    if any(word in str(error) for word in ("inline_container", "PytorchStreamWriter", "file write failed")):
        full = shutil.disk_usage(folder).free < NEARLY_FULL_BYTES
        return os.strerror(errno.ENOSPC) if full else "a file could not be written whole"
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"
