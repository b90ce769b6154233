"""From files in a hidden directory to a checkpoint: all of it on disk, then visible at once."""

import os
import secrets
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import accelerate
import torch

from accel_parallel import __version__
from accel_parallel.checkpoints import (
    FORMAT,
    MANIFEST,
    PARTIAL,
    REMOVED,
    Manifest,
    State,
    Stored,
    complete_checkpoints,
    sha256_of,
)
from accel_parallel.files import fsync
from accel_parallel.train.state import TrainState

VERSIONS = {"accel_parallel": __version__, "torch": torch.__version__, "accelerate": accelerate.__version__}


def partial_of(final: Path) -> Path:
    """Where a checkpoint is written until it is complete."""
    return final.with_name(f"{PARTIAL}{final.name}")


def clear(partial: Path) -> None:
    """An empty directory, whatever an earlier save left there."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def own_files(partial: Path, rank: int) -> dict[str, Stored]:
    """The files that this rank wrote, once they are on disk. torch names data after its rank; the first adds metadata.

    (`FileSystemWriter.prepare_global_plan`: the files of a rank begin with `__<rank>_`.)
    """
    found = {}
    for path in sorted(partial.iterdir()):
        if path.name.startswith(f"__{rank}_") or (rank == 0 and not path.name.startswith("__")):
            fsync(path)
            found[path.name] = Stored(bytes=path.stat().st_size, sha256=sha256_of(path))
    return found


def publish(
    partial: Path, files: dict[str, Stored], state: TrainState, *, about: dict[str, Any], keep: int
) -> Manifest:
    """On one process: write the manifest, make the checkpoint visible, and only then remove old ones beyond `keep`."""
    final = partial.with_name(partial.name.removeprefix(PARTIAL))
    manifest = Manifest(
        format=FORMAT, state=State(**asdict(state)), files=files, versions=VERSIONS, written=time.time(), **about
    )
    with (partial / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(manifest.dumps())
        file.flush()
        os.fsync(file.fileno())
    fsync(partial)
    if os.path.lexists(final):  # a link to nothing too
        # Not a complete one, or training would have gone on from it: somebody may want to look at it.
        final.rename(final.with_name(f".damaged-{final.name}-{secrets.token_hex(4)}"))
    partial.rename(final)
    for folder in (final.parent, final.parent.parent):
        fsync(folder)
    # Newer ones were left behind when training went on from an earlier one, and do not count.
    written = [path for step, path in complete_checkpoints(final.parent.parent).items() if step <= state.step]
    for old in written[:-keep]:
        # Hidden first: a kill on the way leaves no checkpoint that looks damaged.
        hidden = old.with_name(f"{REMOVED}{old.name}")
        old.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    return manifest
