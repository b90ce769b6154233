"""Training that cannot go on: not-finite losses, full disks, processes that hold other data. Nothing is lost."""

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_parallel.checkpoints import complete_checkpoints
from accel_parallel.errors import TrainingError
from accel_parallel.train.meter import refuse_bad
from tests.workers import train


def test_a_loss_that_explodes_stops_with_step_and_rank(toy: list[str], tmp_path: Path) -> None:
    """A real one: with this learning rate the weights overflow."""
    sets = [*toy, "training.lr=1e30", "training.warmup_steps=6", "checkpoint.every=1", "checkpoint.keep=3"]
    result = train(tmp_path / "run", "fsdp", 2, sets)
    assert result.exit_codes == [2, 2]
    match = re.search(r"the (loss|gradient) is not finite at step (\d+)", result.message)
    assert match is not None, result.message
    step = int(match[2])
    saved = complete_checkpoints(result.run)
    assert max(saved) == step - 1, "what was saved stays"
    # From the weights of step - 1 came what is not finite: the one before, if there is one, is the last good one.
    good = f"last good checkpoint: {saved[step - 2]};" if step - 2 in saved else "no good checkpoint was written yet;"
    assert good in result.message
    assert "NaN" not in (result.run / "metrics.jsonl").read_text()
    for line in (result.run / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


def test_the_rank_that_saw_it_first_is_named(toy: list[str], tmp_path: Path) -> None:
    """Reported rarely, but the step is the one at which it happened, not the one at which somebody looked."""
    sets = [*toy, "logging.every=10", "checkpoint.every=2"]
    environment = {"ACCELERATE_TEST_SABOTAGE": "not finite on rank 1 at step 5"}
    result = train(tmp_path / "run", "ddp", 2, sets, environment=environment)
    assert result.exit_codes == [2, 2]
    assert "the loss is not finite at step 5 on rank 1" in result.message
    assert "step-00000002" in result.message
    assert list(complete_checkpoints(result.run)) == [2, 4]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        assert "CI" not in os.environ, "CI runs as root and can mount a small file system"
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_gradient_that_is_not_finite_stops_too(toy: list[str], tmp_path: Path) -> None:
    """With a finite loss: the step would have poisoned the weights, and the next checkpoint."""
    environment = {"ACCELERATE_TEST_SABOTAGE": "gradient not finite at step 4"}
    result = train(tmp_path / "run", "ddp", 2, [*toy, "checkpoint.every=1", "logging.every=1"], environment=environment)
    assert result.exit_codes == [2, 2]
    assert "the gradient is not finite at step 4, with a finite loss on every rank" in result.message
    assert max(complete_checkpoints(result.run)) == 3


@pytest.mark.parametrize(
    ("loss_step", "gradient_step", "words"),
    [
        (5.0, 5.0, "the loss is not finite at step 5 on rank 1"),
        (5.0, math.inf, "the loss is not finite at step 5 on rank 1"),
        (6.0, 5.0, "the gradient is not finite at step 5, with a finite loss on every rank"),
        (math.inf, 5.0, "the gradient is not finite at step 5, with a finite loss on every rank"),
    ],
)
def test_what_went_wrong_first_is_told(loss_step: float, gradient_step: float, words: str) -> None:
    rows = [[1.0, 1.0, math.inf, gradient_step, 0.0], [1.0, 1.0, loss_step, gradient_step, 0.0]]
    with pytest.raises(TrainingError, match=words) as error:
        refuse_bad(rows)
    assert error.value.step == 5


def test_a_full_disk_is_one_line_and_keeps_what_there_was(toy: list[str], small_disk: Path) -> None:
    """A checkpoint has about half a megabyte, so one of them does not fit any more."""
    sets = [*toy, "checkpoint.every=2", "checkpoint.keep=9"]
    result = train(small_disk / "run", "fsdp", 2, sets)
    assert result.exit_codes == [2, 2], result.log
    assert re.search(r"cannot save .*step-\d+: No space left on device \(rank \d\)", result.message)
    assert result.errors[0]["traceback"] is None
    kept = complete_checkpoints(result.run)
    assert len(kept) >= 2
    assert not list((result.run / "checkpoints").glob(".partial*")), "what did not fit is not left lying about"
    for path in list(kept.values())[:-1]:
        shutil.rmtree(path)
    again = train(small_disk / "run", "fsdp", 2, [*toy, "checkpoint.every=0"])
    assert again.exit_codes == [0, 0], again.errors
    assert f"continues at step {max(kept)} of 20" in again.log


def test_a_full_disk_under_a_save_behind_ends_the_run_a_step_later(toy: list[str], small_disk: Path) -> None:
    """Not only when the next save would have waited for it. One checkpoint fits beside the ballast, two do not."""
    (small_disk / "ballast").write_bytes(b"x" * 900_000)
    sets = [*toy, "checkpoint.every=6", "checkpoint.keep=9", "checkpoint.async=true"]
    result = train(small_disk / "run", "fsdp", 2, sets)
    assert result.exit_codes == [2, 2], result.log
    for error in result.errors:
        [problem] = error["problems"]
        assert re.fullmatch(r"cannot save .*step-00000012: No space left on device \(rank \d\)", problem["message"])
        assert problem["hint"] == "step-00000006 is intact, its digests were read"
        assert error["traceback"] is None
    assert len(result.errors) == 2
    assert 12 < max(result.rows()) < 18
    assert list(complete_checkpoints(result.run)) == [6]
    assert not list((result.run / "checkpoints").glob(".partial*"))
    (small_disk / "ballast").unlink()
    again = train(small_disk / "run", "fsdp", 2, [*toy, "checkpoint.async=true"])
    assert again.exit_codes == [0, 0], again.errors
    assert "continues at step 6 of 20" in again.log


def test_metrics_on_a_full_disk_are_one_line(toy: list[str], small_disk: Path) -> None:
    run = small_disk / "run"
    run.mkdir()
    first = train(run, "ddp", 2, toy, argv=["--stop-at", "2"])
    assert first.exit_codes == [0, 0]
    with (small_disk / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 512)
    result = train(run, "ddp", 2, toy)
    assert 2 in result.exit_codes
    assert "No space left on device" in result.message
    assert result.errors[0]["traceback"] is None
    assert list(complete_checkpoints(run)) == [2]


def test_processes_with_other_tokens_are_refused(toy: list[str], tmp_path: Path) -> None:
    environment = {"ACCELERATE_TEST_SABOTAGE": "other tokens on rank 1"}
    result = train(tmp_path / "run", "ddp", 2, toy, environment=environment)
    assert result.exit_codes == [2, 2]
    assert "rank 1 holds other tokens than rank 0" in result.message
    assert not result.run.exists()


def test_fewer_accelerators_than_processes(toy: list[str], tmp_path: Path) -> None:
    environment = {"ACCELERATE_TEST_SABOTAGE": "one accelerator"}
    result = train(tmp_path / "run", "fsdp", 2, toy, environment=environment)
    assert result.exit_codes == [2, 2]
    assert "2 processes on this machine, accelerators: 1" in result.message
    assert "--num-processes" in result.message
    assert "--cpu" in result.message
    forced = train(tmp_path / "run", "fsdp", 2, toy, environment=environment, argv=["--cpu", "--stop-at", "2"])
    assert forced.exit_codes == [0, 0]


@pytest.mark.parametrize("key", ["fsdp.min_num_params=2M", "distributed.mixed_precision=no", "fsdp.cpu_offload=true"])
def test_a_worker_refuses_to_override_what_the_yaml_decides(key: str, toy: list[str], tmp_path: Path) -> None:
    result = train(tmp_path / "run", "ddp", 2, toy, argv=["--set", key])
    assert result.exit_codes == [2, 2]
    assert "is decided by the accelerate YAML" in result.message
    assert "accel-parallel config" in result.message
    assert not result.run.exists()
