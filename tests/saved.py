"""Checkpoints for tests that never load one: a manifest, and a file of three characters."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_parallel.checkpoints import FORMAT, Manifest, State, Stored, sha256_of
from accel_parallel.spec import RunSpec


def checkpoint(run: Path, step: int, *, spec: RunSpec | None = None, strategy: str = "fsdp", age: float = 0.0) -> Path:
    """A complete one of `run`."""
    folder = run / f"checkpoints/step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "shard").write_text("abc")
    spec = spec or RunSpec()
    manifest = Manifest(
        format=FORMAT,
        state=State(step=step, samples=8 * step, tokens=256 * step),
        strategy=strategy,
        world_size=spec.num_processes,
        data="fingerprint",
        files={"shard": Stored(bytes=3, sha256=sha256_of(folder / "shard"))},
        versions={"torch": "2.13.0"},
        spec=spec.model_dump(mode="json", by_alias=True),
        written=time.time() - age,
    )
    (folder / "manifest.json").write_text(manifest.dumps())
    return folder


def forge(folder: Path, changes: Mapping[str, Any]) -> None:
    """Change the manifest as somebody would who computes its digest again; a value of None removes the key."""
    from accel_parallel.checkpoints import _digest_of

    content = json.loads((folder / "manifest.json").read_text())
    del content["sha256"]
    content = {key: value for key, value in {**content, **changes}.items() if value is not None}
    (folder / "manifest.json").write_text(json.dumps({**content, "sha256": _digest_of(content)}))
