"""Saving, while the loop waits or in the background.

A background save is torch.distributed.checkpoint's asynchronous one: it copies to host memory during the next step's
forward and backward pass, and then writes on a process group of its own; on the default one its collectives and those
of the training would wait for each other.
"""

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from accel_parallel.checkpoints import Stored
from accel_parallel.errors import RunError
from accel_parallel.train.checkpoint.publish import clear, own_files, partial_of
from accel_parallel.train.checkpoint.together import Together

Publish = Callable[[Path, dict[str, Stored]], object]


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is on disk, `seconds` after its save began; for `stood_still` of them the loop waited."""

    path: Path
    step: int
    bytes: int
    seconds: float
    stood_still: float = 0.0


class Writer:
    """Writes one checkpoint at a time."""

    def __init__(self, group: distributed.ProcessGroup | None, folder: Path, *, in_background: bool) -> None:
        self._together = Together(group, folder)
        self._stager = _stager() if in_background else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if in_background else None
        self._staged: Future[None] | None = None
        self._pending: Future[Saved] | None = None
        self._stood_still = 0.0

    def start(self, final: Path, step: int, state_dict: dict[str, Any], publish: Publish) -> None:
        """Collective. Begin to write `final`; `collect` tells when it is there.

        Raises RunError if it cannot be begun, or, where the loop waits for it, written.
        """
        assert self._pending is None, "one save at a time"
        begun = time.perf_counter()
        partial, doing = partial_of(final), f"cannot save {final}"
        self._together.do(doing, lambda: clear(partial) if self._together.rank == 0 else None)
        if self._thread is None:
            files = self._finish(doing, partial, lambda: self._write(state_dict, partial), publish)
            self._stood_still = seconds = time.perf_counter() - begun
            self._pending = Future()
            self._pending.set_result(Saved(final, step, _bytes(files), seconds))
            return
        # From here on the group belongs to the threads behind, until they have ended.
        upload = self._copy(state_dict, partial)

        def finish() -> Saved:
            files = self._finish(doing, partial, upload.result, publish)
            return Saved(final, step, _bytes(files), time.perf_counter() - begun)

        self._pending = self._thread.submit(finish)
        self._stood_still = time.perf_counter() - begun

    def wait_until_copied(self) -> None:
        """Until what is being saved may be changed."""
        if self._staged is not None:
            begun = time.perf_counter()
            # An error of it is one of the save, which tells it on all ranks.
            self._staged.exception()
            self._staged = None
            self._stood_still += time.perf_counter() - begun

    @property
    def failed(self) -> bool:
        """Whether the save behind has ended with an error."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def collect(self, *, wait: bool) -> Saved | None:
        """The save that has ended since the last call, if any; each process may see it at another step.

        With `wait` on all processes the last one is waited for, and RunError raised on all if it failed.
        """
        if self._pending is None or not (wait or self._pending.done()) or (self.failed and not wait):
            return None
        pending, self._pending = self._pending, None
        begun = time.perf_counter()
        saved = pending.result()
        return replace(saved, stood_still=self._stood_still + time.perf_counter() - begun)

    def _copy(self, state_dict: dict[str, Any], partial: Path) -> Future[Any]:
        from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

        from accel_parallel.train.checkpoint.sharded import with_dtensors

        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the copies are made on a stream that does not wait for the others
        response = async_save(
            with_dtensors(state_dict),
            checkpoint_id=partial,
            process_group=self._together.group,
            async_stager=self._stager,
            no_dist=self._together.group is None,
        )
        assert isinstance(response, AsyncSaveResponse)  # as the stager copies in a thread
        self._staged = response.staging_completion
        return response.upload_completion

    def _write(self, state_dict: dict[str, Any], partial: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        group = self._together.group
        save(state_dict, checkpoint_id=partial, process_group=group, no_dist=group is None)

    def _finish(self, doing: str, partial: Path, written: Callable[[], Any], publish: Publish) -> dict[str, Stored]:
        """Wait until it is written, and make it visible; an error leaves nothing of it. The files by name."""
        together = self._together
        try:
            together.do(doing, written)
            own = together.do(doing, lambda: own_files(partial, together.rank))
            files = {name: stored for part in together.gather(own) for name, stored in part.items()}
            together.do(doing, lambda: publish(partial, files) if together.rank == 0 else None)
        except RunError:
            if together.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        return files


def _bytes(files: dict[str, Stored]) -> int:
    return sum(file.bytes for file in files.values())


def _stager() -> Any:
    """Copies in a thread; with pinned memory and beside the computation where there is an accelerator."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    accelerated = torch.accelerator.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=accelerated,
            use_shared_memory=False,
            use_async_staging=True,
            use_non_blocking_copy=accelerated,
        )
    )
