"""The catalogue: each row applies to the default specification, and names are found or explained."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from accel_parallel.errors import LaunchError, SpecError
from accel_parallel.spec import RunSpec, load_spec, read_spec
from accel_parallel.strategies import CATALOGUE, STRATEGIES, Kind, Strategy, find_strategy

CLUSTER = ["distributed.num_machines=2", "distributed.processes_per_machine=8"]


def test_names_are_unique_and_in_reading_order() -> None:
    assert list(STRATEGIES) == [strategy.name for strategy in CATALOGUE]
    assert [(strategy.name, strategy.kind) for strategy in CATALOGUE[:3]] == [
        ("single", Kind.NO),
        ("ddp", Kind.DDP),
        ("fsdp", Kind.FSDP),
    ]
    assert len(STRATEGIES) == 11


@pytest.mark.parametrize("strategy", CATALOGUE, ids=lambda strategy: strategy.name)
def test_a_row_decides_what_its_name_says(strategy: Strategy) -> None:
    """Whatever the fsdp section holds: the other versions, strategies and offloads."""
    assert set(strategy.overrides) <= set(RunSpec().flat())
    for sets in ([], ["fsdp.version=1", "fsdp.sharding_strategy=NO_SHARD"], ["fsdp.cpu_offload=true"], CLUSTER):
        applied = strategy.resolve(read_spec(sets=sets)).flat()
        assert {key: applied[key] for key in strategy.overrides} == dict(strategy.overrides)


def test_single_has_one_process_whatever_the_specification_says() -> None:
    draft = read_spec(sets=[*CLUSTER, "training.lr=1e-2"])
    applied = STRATEGIES["single"].resolve(draft)
    assert (applied.num_processes, applied.training.lr) == (1, 1e-2)
    assert draft.resolve().num_processes == 16


def test_strategies_without_overrides_leave_the_specification_alone() -> None:
    assert STRATEGIES["ddp"].resolve(read_spec()) == STRATEGIES["fsdp"].resolve(read_spec()) == RunSpec()


@pytest.mark.parametrize(
    ("name", "sets", "world"),
    [
        ("fsdp_hybrid_shard", [], (1, 4)),
        ("fsdp_hybrid_shard", ["distributed.processes_per_machine=8"], (1, 8)),
        ("fsdp_hybrid_shard", ["distributed.num_machines=2"], (2, 2)),
        ("fsdp1_hybrid_shard", [], (2, 2)),
        ("fsdp1_hybrid_shard", ["distributed.processes_per_machine=1", "distributed.num_machines=3"], (3, 2)),
        ("fsdp1_hybrid_shard", CLUSTER, (2, 8)),
        ("fsdp_shard_grad_op", [], (1, 2)),
    ],
)
def test_a_strategy_that_needs_more_processes_gets_them_and_says_so(
    name: str, sets: list[str], world: tuple[int, int]
) -> None:
    draft = read_spec(sets=sets)
    asked, distributed = draft.resolve().distributed, STRATEGIES[name].resolve(draft).distributed
    assert (distributed.num_machines, distributed.processes_per_machine) == world
    said = STRATEGIES[name].raised(draft)
    if world == (asked.num_machines, asked.processes_per_machine):
        assert said is None
    else:
        assert said == (
            f"{name} needs more than {asked.num_machines} x {asked.processes_per_machine} processes "
            f"(machines x processes on each): {world[0]} x {world[1]}"
        )


@pytest.mark.parametrize(
    ("name", "entry", "means"),
    [
        ("fsdp1_full_shard", "fsdp.sharding_strategy=NO_SHARD", "fsdp.sharding_strategy=FULL_SHARD"),
        ("fsdp_cpu_offload", "fsdp.cpu_offload=false", "fsdp.cpu_offload=true"),
        ("fsdp_shard_grad_op", "fsdp.version=1", "fsdp.version=2"),
        ("single", "distributed.processes_per_machine=2", "distributed.processes_per_machine=1"),
    ],
)
def test_an_override_against_the_name_is_refused(name: str, entry: str, means: str) -> None:
    with pytest.raises(SpecError) as caught:
        STRATEGIES[name].refuse_contradictions(["training.lr=1", entry])
    assert str(caught.value).startswith(f"--set {entry}: {name} means {means} (")
    agreeing = f"{means}"
    STRATEGIES[name].refuse_contradictions(["training.lr=1", agreeing, "not an override"])


def test_a_row_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        STRATEGIES["ddp"].name = "x"  # type: ignore[misc]
    changeable: Any = STRATEGIES["single"].overrides
    with pytest.raises(TypeError):
        changeable["training.lr"] = 1


def test_a_row_that_contradicts_the_specification_says_which() -> None:
    row = Strategy("broken", Kind.FSDP, "s", {"fsdp.sharding_strategy": "NO_SHARD"})
    with pytest.raises(SpecError, match="strategy broken: fsdp: NO_SHARD does not exist in FSDP version 2"):
        row.resolve(read_spec())


def test_the_wrap_of_a_row_follows_its_version_unless_it_was_given() -> None:
    row = STRATEGIES["fsdp1_full_shard"]
    assert row.resolve(read_spec()).fsdp.wrap == "size"
    assert row.resolve(read_spec(sets=["fsdp.wrap=block"])).fsdp.wrap == "block"
    assert load_spec().fsdp.wrap == "block"


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


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_has_a_recipe_that_launches_it(name: str) -> None:
    recipes = (Path(__file__).parent.parent / "justfile").read_text()
    assert f"\n{name} *args:\n    accel-parallel launch {name} {{{{args}}}}\n" in recipes


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("single", "fsdp.cpu_offload"),
        ("single", "ddp.static_graph"),
        ("ddp", "fsdp.min_num_params"),
        ("fsdp", "ddp.bucket_cap_mb"),
        ("fsdp1_no_shard", "ddp.bucket_cap_mb"),
    ],
)
def test_an_override_that_has_no_effect_under_a_strategy_is_told(name: str, key: str) -> None:
    entries = ["training.lr=1", f"{key}=1", "not an override"]
    assert STRATEGIES[name].without_effect(entries) == [f"--set {key} has no effect under {name}"]


def test_sections_of_its_own_kind_have_an_effect() -> None:
    assert STRATEGIES["ddp"].without_effect(["ddp.static_graph=true", "distributed.processes_per_machine=4"]) == []
    assert STRATEGIES["fsdp"].without_effect(["fsdp.cpu_offload=true"]) == []
