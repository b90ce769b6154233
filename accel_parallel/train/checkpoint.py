"""Checkpoints through torch.distributed.checkpoint: one format for every strategy and number of processes.

A checkpoint is written into a hidden directory and renamed when all of it is on disk: complete or invisible.
"""

import errno
import json
import os
import secrets
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch import nn

from accel_parallel import __version__
from accel_parallel.errors import AccelParallelError, RunError
from accel_parallel.files import fsync
from accel_parallel.runs import MANIFEST, Run, complete_checkpoints, newest_checkpoint, read_manifest
from accel_parallel.train.runtime import Runtime
from accel_parallel.train.state import TrainState

FORMAT = 1
NEARLY_FULL_BYTES = 4 * 2**20
VERSIONS = {"accel_parallel": __version__, "torch": torch.__version__, "accelerate": accelerate.__version__}


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is on disk. `seconds` is how long the loop stood still for it."""

    path: Path
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of one run. Saving and restoring are collective: every rank."""

    run: Run
    keep: int
    runtime: Runtime
    data_fingerprint: str

    def path(self, state: TrainState) -> Path:
        """Where the checkpoint of this state is, or would be."""
        return self.run.checkpoints / f"step-{state.step:08d}"

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainState) -> Saved:
        """Collective. Write `checkpoints/step-<NNNNNNNN>`, then remove complete ones beyond the newest `keep`.

        Raises RunError when the disk does not take it; earlier checkpoints stay as they are.
        """
        begun = time.perf_counter()
        final = self.path(state)
        partial = final.with_name(f".partial-{final.name}")
        try:
            self._write(partial, final, model, optimizer, state)
        except RunError:
            if self.runtime.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        size = sum(path.stat().st_size for path in final.iterdir()) if self.runtime.is_main else 0
        return Saved(final, time.perf_counter() - begun, size)

    def _write(
        self, partial: Path, final: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainState
    ) -> None:
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.checkpoint.state_dict_saver import save

        with self._as_one(f"cannot save {final}"):
            if self.runtime.is_main:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        weights, moments = get_state_dict(model, unwrap(optimizer))
        with self._as_one(f"cannot save {final}"), _quiet():
            save({"model": weights, "optimizer": moments}, checkpoint_id=partial, no_dist=self._alone)
        with self._as_one(f"cannot save {final}"):
            if self.runtime.is_main:
                self._publish(partial, final, state)

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainState:
        """Collective. Load the newest complete checkpoint in place; a fresh state if there is none."""
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        from accel_parallel.train.reader import DataPlanner, DataReader

        found = newest_checkpoint(self.run.path)
        # The main process's view counts: on a shared disk others may see a new directory later.
        told: tuple[Path | None, dict[str, Any]] = (found, (read_manifest(found) if found else None) or {})
        newest, manifest = self.runtime.tell_all(told)
        if newest is None:
            return TrainState()
        if manifest.get("format") != FORMAT:
            raise RunError(f"{newest} has format {manifest.get('format')}, this version reads {FORMAT}")
        if manifest["data"] != self.data_fingerprint:
            raise RunError(
                f"{newest} was trained on other tokens than these: the text or its tokenizer changed",
                hint="--fresh starts a new run",
            )
        weights, moments = get_state_dict(model, unwrap(optimizer))
        loading = self._as_one(f"cannot load {newest}", hint=f"move {newest.name} away to go on from the one before")
        with loading:
            reader = DataReader(newest)
        with loading, _quiet():
            wanted = {"model": weights, "optimizer": moments}
            load(wanted, storage_reader=reader, planner=DataPlanner(), no_dist=self._alone)
        set_state_dict(model, unwrap(optimizer), model_state_dict=weights, optim_state_dict=moments)
        return TrainState(**manifest["state"])

    @property
    def _alone(self) -> bool:
        return self.runtime.world_size == 1

    def _as_one(self, doing: str, hint: str = "earlier checkpoints are as they were") -> "_Together":
        return _Together(self.runtime, doing, hint, self.run.path)

    def _publish(self, partial: Path, final: Path, state: TrainState) -> None:
        files = sorted(path for path in partial.iterdir() if path.is_file())
        for path in files:
            fsync(path)
        manifest = {
            "format": FORMAT,
            "state": asdict(state),
            "strategy": self.runtime.asked.strategy_name,
            "world_size": self.runtime.world_size,
            "data": self.data_fingerprint,
            "files": {path.name: path.stat().st_size for path in files},
            "versions": VERSIONS,
            "spec": self.runtime.spec.model_dump(mode="json"),
        }
        with (partial / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if final.exists():
            # Not a complete one, or training would have gone on from it: somebody may want to look at it.
            final.rename(final.with_name(f".damaged-{final.name}-{secrets.token_hex(4)}"))
        partial.rename(final)
        fsync(final.parent)
        for path in list(complete_checkpoints(self.run.path).values())[: -self.keep]:
            shutil.rmtree(path)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that a single process has no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _Together:
    """Something each process does and that may fail on some: then all raise, and none waits for the others."""

    def __init__(self, runtime: Runtime, doing: str, hint: str, folder: Path) -> None:
        self.runtime = runtime
        self.doing = doing
        self.hint = hint
        self.folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # DCP's CheckpointException is a BaseException, so what passes through is named instead.
        if isinstance(error, KeyboardInterrupt | SystemExit):
            return
        reasons = self.runtime.gather_objects(None if error is None else _reason(error, self.folder))
        failed = [(rank, reason) for rank, reason in enumerate(reasons) if reason is not None]
        if failed:
            rank, reason = failed[0]
            raise RunError(f"{self.doing}: {reason} (rank {rank})", hint=self.hint) from error


def _reason(error: BaseException, folder: Path) -> str:
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


def unwrap(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside Accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)
