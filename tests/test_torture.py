"""A few of the kills of `just torture`: each strategy once with a save that waits, and once with one behind."""

from pathlib import Path

from tests.test_catalogue import SHAPE
from tests.torture import STRATEGIES, WORLD_SIZE, Kill, table, torture

SEED = 0


def test_killed_again_and_again_training_ends_as_if_it_never_had_been(toy: list[str], tmp_path: Path) -> None:
    said: list[str] = []
    report = torture(tmp_path, [*toy, *SHAPE], seed=SEED, kills=2 * len(STRATEGIES), steps=20, say=said.append)
    assert report.mismatches == []
    assert {(kill.strategy, kill.in_background) for kill in report.kills} == {
        (strategy, in_background) for strategy in STRATEGIES for in_background in (False, True)
    }
    assert any(kill.inside_a_save for kill in report.kills), "\n".join(said)
    assert {len(kill.ranks) for kill in report.kills} == {1, WORLD_SIZE}
    assert table(report).endswith(", 0 mismatches")


def test_a_kill_is_inside_a_save_only_if_bytes_were_written() -> None:
    kill = Kill("ddp", False, "save", [0, 1], began=4, step=8, kept=4, unpublished={".partial-step-00000008/a": 9})
    assert kill.inside_a_save
    assert (kill.lost, kill.allowed) == (4, 4)
    assert not Kill("ddp", False, "save", [0], began=4, step=8, kept=8, unpublished={}).inside_a_save
