"""The catalogue: each row applies to the default specification, and names are found or explained."""

import dataclasses

import pytest

from accel_parallel.errors import LaunchError, SpecError
from accel_parallel.spec import RunSpec, load_spec
from accel_parallel.strategies import CATALOGUE, STRATEGIES, Kind, Strategy, find_strategy


def test_names_are_unique_and_in_reading_order() -> None:
    assert list(STRATEGIES) == [strategy.name for strategy in CATALOGUE]
    assert [(strategy.name, strategy.kind) for strategy in CATALOGUE[:3]] == [
        ("single", Kind.NO),
        ("ddp", Kind.DDP),
        ("fsdp", Kind.FSDP),
    ]


@pytest.mark.parametrize("strategy", CATALOGUE, ids=lambda strategy: strategy.name)
def test_overrides_name_keys_that_exist(strategy: Strategy) -> None:
    assert set(strategy.overrides) <= set(RunSpec().flat())
    applied = strategy.apply(RunSpec()).flat()
    assert {key: applied[key] for key in strategy.overrides} == dict(strategy.overrides)


def test_single_has_one_process_whatever_the_specification_says() -> None:
    spec = load_spec(sets=["distributed.num_machines=2", "distributed.processes_per_machine=8", "training.lr=1e-2"])
    applied = STRATEGIES["single"].apply(spec)
    assert (applied.num_processes, applied.training.lr) == (1, 1e-2)
    assert spec.num_processes == 16


def test_strategies_without_overrides_leave_the_specification_alone() -> None:
    spec = RunSpec()
    assert STRATEGIES["ddp"].apply(spec) == STRATEGIES["fsdp"].apply(spec) == spec


def test_a_row_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        STRATEGIES["ddp"].name = "x"  # type: ignore[misc]
    with pytest.raises(TypeError):
        STRATEGIES["single"].overrides["training.lr"] = 1  # type: ignore[index]


def test_a_later_row_is_one_line() -> None:
    row = Strategy("fsdp1_no_shard", Kind.FSDP, "s", {"fsdp.version": 1, "fsdp.sharding_strategy": "NO_SHARD"})
    applied = row.apply(RunSpec())
    assert (applied.fsdp.version, applied.fsdp.sharding_strategy) == (1, "NO_SHARD")


def test_a_row_that_contradicts_the_specification_says_which() -> None:
    row = Strategy("broken", Kind.FSDP, "s", {"fsdp.sharding_strategy": "NO_SHARD"})
    with pytest.raises(SpecError, match="strategy broken: fsdp: NO_SHARD does not exist in FSDP version 2"):
        row.apply(RunSpec())


def test_find_strategy() -> None:
    assert find_strategy("fsdp").kind is Kind.FSDP


@pytest.mark.parametrize(("name", "guess"), [("fdsp", "fsdp"), ("DPP", "ddp"), ("singel", "single")])
def test_unknown_name_gets_a_guess_and_the_list(name: str, guess: str) -> None:
    with pytest.raises(LaunchError) as caught:
        find_strategy(name)
    assert str(caught.value) == (f"unknown strategy {name!r}; did you mean {guess!r}? (known: {', '.join(STRATEGIES)})")


def test_a_name_like_nothing_gets_only_the_list() -> None:
    with pytest.raises(LaunchError) as caught:
        find_strategy("zebra")
    assert "did you mean" not in str(caught.value)
    assert "single, ddp, fsdp" in str(caught.value)
