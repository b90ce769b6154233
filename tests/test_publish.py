"""A checkpoint is visible when all of it is on disk, and an old one goes only after that."""

import os
from pathlib import Path
from typing import Any

import pytest

from accel_parallel.checkpoints import Stored, complete_checkpoints, list_checkpoints, wrong_digest
from accel_parallel.train.checkpoint import publish as module
from accel_parallel.train.checkpoint.publish import clear, own_files, partial_of, publish
from accel_parallel.train.state import TrainState
from tests.saved import checkpoint

ABOUT: dict[str, Any] = {"strategy": "ddp", "world_size": 2, "data": "fingerprint", "spec": {}}


def write(run: Path, step: int, keep: int = 2) -> None:
    """What the two ranks of a job do."""
    partial = partial_of(run / f"checkpoints/step-{step:08d}")
    clear(partial)
    for name in ("__0_0.distcp", "__1_0.distcp", "__10_0.distcp", ".metadata"):
        (partial / name).write_text(f"{name} of {step}")
    files: dict[str, Stored] = {}
    for rank in (0, 1, 10):
        files |= own_files(partial, rank)
    assert len(files) == 4
    publish(partial, files, TrainState(step, 8 * step, 256 * step), about=ABOUT, keep=keep)


def test_each_rank_answers_for_the_files_that_it_wrote(tmp_path: Path) -> None:
    for name in ("__0_0.distcp", "__1_0.distcp", "__10_0.distcp", ".metadata"):
        (tmp_path / name).write_text(name)
    assert set(own_files(tmp_path, 0)) == {"__0_0.distcp", ".metadata"}
    assert set(own_files(tmp_path, 1)) == {"__1_0.distcp"}
    assert set(own_files(tmp_path, 10)) == {"__10_0.distcp"}


def test_what_is_published_is_complete_and_intact(tmp_path: Path) -> None:
    write(tmp_path, 5)
    (found,) = list_checkpoints(tmp_path)
    assert found.damage is None
    assert wrong_digest(found) is None
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        write(tmp_path, step)
    assert list(complete_checkpoints(tmp_path)) == [15, 20]


def test_newer_ones_from_before_a_step_back_do_not_push_out_what_was_just_written(tmp_path: Path) -> None:
    for step in (10, 40):
        checkpoint(tmp_path, step)
    write(tmp_path, 20, keep=1)
    assert list(complete_checkpoints(tmp_path)) == [20, 40]


def test_what_stood_in_the_way_is_put_aside(tmp_path: Path) -> None:
    damaged = checkpoint(tmp_path, 10)
    (damaged / "shard").write_text("ab")
    write(tmp_path, 10)
    assert list(complete_checkpoints(tmp_path)) == [10]
    (aside,) = (tmp_path / "checkpoints").glob(".damaged-step-00000010-*")
    assert (aside / "shard").read_text() == "ab"


def test_the_order_of_things_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, then the manifest, then the directory, then the name, then the directory above; then an old one may go."""
    write(tmp_path, 5, keep=1)
    done: list[str] = []
    original_fsync, original_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        done.append(f"fsync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        original_fsync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        done.append(f"{self.name} -> {target.name}")
        return original_rename(self, target)

    def rmtree(path: Path, **_: Any) -> None:
        done.append(f"remove {path.name}")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(module.shutil, "rmtree", rmtree)
    write(tmp_path, 10, keep=1)
    assert done == [
        "remove .partial-step-00000010",
        *("fsync .metadata", "fsync __0_0.distcp", "fsync __1_0.distcp", "fsync __10_0.distcp"),
        "fsync manifest.json",
        "fsync .partial-step-00000010",
        ".partial-step-00000010 -> step-00000010",
        "fsync checkpoints",
        f"fsync {tmp_path.name}",
        "step-00000005 -> .removed-step-00000005",
        "remove .removed-step-00000005",
    ]
