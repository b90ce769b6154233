"""Stopping and going on: bit for bit the run that never stopped, under the same strategy and number of processes."""

import hashlib
import json
from pathlib import Path

import pytest

from accel_parallel.checkpoints import complete_checkpoints
from tests.workers import Trained, train

LAYOUTS = [("single", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 4), ("fsdp", 4)]
NUMBERS = ("step", "tokens", "loss", "grad_norm", "lr")


def numbers(result: Trained) -> list[list[float]]:
    return [[row[key] for key in NUMBERS] for row in result.rows().values()]


@pytest.fixture(scope="module", params=LAYOUTS, ids=[f"{name}-{size}" for name, size in LAYOUTS])
def pair(
    request: pytest.FixtureRequest, toy: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Trained, Trained, Trained]:
    """A straight run, the first half of another, and its second half."""
    strategy, world_size = request.param
    folder = tmp_path_factory.mktemp("resume")
    straight = train(folder / "straight", strategy, world_size, toy)
    half = train(folder / "halves", strategy, world_size, toy, argv=["--stop-at", "10"])
    resumed = train(folder / "halves", strategy, world_size, toy)
    for result in (straight, half, resumed):
        assert set(result.exit_codes) == {0}, result.errors
    return straight, half, resumed


def test_resumed_run_is_the_straight_one_bit_for_bit(pair: tuple[Trained, Trained, Trained]) -> None:
    straight, half, resumed = pair
    assert half.summary is not None
    assert half.summary["step"] == 10
    assert "continues at step 10 of 20" in resumed.log
    assert len(numbers(straight)) == 20
    assert numbers(resumed) == numbers(straight)
    assert resumed.column("loss", "eval")[-1] == straight.column("loss", "eval")[-1]


def test_summary_covers_the_whole_run(pair: tuple[Trained, Trained, Trained]) -> None:
    straight, _, resumed = pair
    assert straight.summary is not None
    assert resumed.summary is not None
    for key in ("first_train_loss", "last_train_loss", "val_loss", "step", "tokens", "sample"):
        assert resumed.summary[key] == straight.summary[key], key


def test_checkpoint_says_what_it_is(pair: tuple[Trained, Trained, Trained]) -> None:
    straight, _, resumed = pair
    assert list(complete_checkpoints(resumed.run)) == [10, 20]
    manifest = json.loads((complete_checkpoints(straight.run)[20] / "manifest.json").read_text())
    assert manifest["state"] == {"step": 20, "samples": 160, "tokens": 160 * 32}
    assert manifest["files"]
    for name, stored in manifest["files"].items():
        content = (complete_checkpoints(straight.run)[20] / name).read_bytes()
        assert stored == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_only_the_newest_checkpoints_are_kept(toy: list[str], tmp_path: Path) -> None:
    result = train(tmp_path / "run", "ddp", 2, [*toy, "checkpoint.every=5", "checkpoint.keep=2"])
    assert list(complete_checkpoints(result.run)) == [15, 20]
    assert not list((result.run / "checkpoints").glob(".partial*"))
    assert [row["path"] for row in result.rows("save").values()] == [f"step-{step:08d}" for step in (5, 10, 15, 20)]


def test_an_incomplete_checkpoint_is_not_used_and_not_removed(toy: list[str], tmp_path: Path) -> None:
    first = train(tmp_path / "run", "fsdp", 2, [*toy, "checkpoint.every=5"], argv=["--stop-at", "10"])
    torn = complete_checkpoints(first.run)[10]
    (torn / "manifest.json").unlink()
    again = train(tmp_path / "run", "fsdp", 2, [*toy, "checkpoint.every=5"], argv=["--stop-at", "7"])
    assert "continues at step 5 of 20" in again.log
    assert torn.is_dir()


@pytest.mark.parametrize(("before", "after"), [(("ddp", 2), ("fsdp", 4)), (("fsdp", 2), ("single", 1))])
def test_a_run_goes_on_under_another_strategy(
    before: tuple[str, int], after: tuple[str, int], toy: list[str], tmp_path: Path
) -> None:
    straight = train(tmp_path / "straight", *before, toy)
    train(tmp_path / "run", *before, toy, argv=["--stop-at", "10"])
    resumed = train(tmp_path / "run", *after, toy)
    assert resumed.exit_codes == [0] * after[1], resumed.errors
    assert resumed.column("loss") == pytest.approx(straight.column("loss"), rel=1e-5)


def test_other_tokens_are_refused(toy: list[str], corpus: Path, tmp_path: Path) -> None:
    """The text changed under a run: going on would mix two data sets."""
    text = tmp_path / "text"
    text.mkdir()
    for path in corpus.iterdir():
        (text / path.name).write_text(path.read_text())
    sets = [*toy, f"data.recipe={text}"]
    train(tmp_path / "run", "single", 1, sets, argv=["--stop-at", "3"])
    (text / "00.txt").write_text("something else\n" * 200)
    again = train(tmp_path / "run", "single", 1, sets)
    assert again.exit_codes == [2]
    assert "was trained on other tokens" in again.message
    assert list(complete_checkpoints(again.run)) == [3]
