"""The pure modules of the light tower: what a launch asked for, what CPUs do differently, what is hidden, errors."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from accel_parallel import substitutions as table
from accel_parallel.accelerate_yaml import environment, loads, render_file
from accel_parallel.asked import Asked, Parallelism, adapt_spec, overruled
from accel_parallel.errors import Problem, SpecError, TrainingError, of_the_system
from accel_parallel.files import fsync
from accel_parallel.redact import redact_command, redact_variables
from accel_parallel.spec import RunSpec, read_spec
from accel_parallel.strategies import CATALOGUE, STRATEGIES, Strategy
from accel_parallel.substitutions import Substitution, substitutions

WORLD = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
FSDP1 = {**WORLD, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}
FSDP2 = {**WORLD, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def asked_by(strategy: Strategy, *sets: str) -> tuple[Asked, RunSpec, dict[str, str]]:
    """What a strategy's file asks for, as its workers read it."""
    spec = strategy.resolve(read_spec(sets=sets))
    world = {
        "WORLD_SIZE": str(spec.num_processes),
        "LOCAL_WORLD_SIZE": str(spec.distributed.processes_per_machine),
    }
    exported = {**environment(loads(render_file(spec, strategy))), **world}
    return Asked.from_environment(exported), spec, exported


# --- What was asked for ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", CATALOGUE, ids=lambda strategy: strategy.name)
def test_a_strategy_is_recognised_in_what_it_exports(strategy: Strategy) -> None:
    asked, spec, _ = asked_by(strategy)
    assert asked.strategy_name == strategy.name
    assert adapt_spec(spec, asked) == spec, "its own file asks for nothing else"
    assert overruled(spec, asked) == []
    assert asked.num_machines == strategy.min_machines
    shards = {"single": 1, "ddp": 1, "fsdp1_no_shard": 1, "fsdp_hybrid_shard": 2, "fsdp1_hybrid_shard": 2}
    assert asked.shard_size == shards.get(strategy.name, 2)


def test_a_shell_that_nobody_prepared_asks_for_one_process() -> None:
    asked = Asked.from_environment({"FSDP_ACTIVATION_CHECKPOINTING": "true", "FSDP_OFFLOAD_PARAMS": "true"})
    assert asked.parallelism is Parallelism.SINGLE
    assert (asked.world_size, asked.num_machines, asked.mixed_precision, asked.wrap_classes) == (1, 1, "no", ())
    assert not (asked.fsdp or asked.cpu_offload or asked.activation_checkpointing)


@pytest.mark.parametrize(
    ("written", "strategy", "shard_size"),
    [
        ("1", "FULL_SHARD", 4),
        ("2", "SHARD_GRAD_OP", 4),
        ("3", "NO_SHARD", 1),
        ("4", "HYBRID_SHARD", 2),
        ("5", "HYBRID_SHARD_ZERO2", 2),
        ("full_shard", "FULL_SHARD", 4),
        ("6", "6", 4),
    ],
)
def test_version_1_names_or_numbers_its_strategies(written: str, strategy: str, shard_size: int) -> None:
    asked = Asked.from_environment({**FSDP1, "LOCAL_WORLD_SIZE": "2", "FSDP_SHARDING_STRATEGY": written})
    assert (asked.sharding_strategy, asked.shard_size) == (strategy, shard_size)
    assert asked.num_machines == 2


def test_precision_that_the_loop_does_not_do() -> None:
    asked = Asked.from_environment({**WORLD, "ACCELERATE_MIXED_PRECISION": "FP16"})
    with pytest.raises(
        SpecError, match="mixed_precision fp16 in the accelerate YAML: this loop trains with no or bf16"
    ):
        adapt_spec(RunSpec(), asked)


def test_activation_checkpointing_is_asked_for_once() -> None:
    asked = Asked.from_environment({**FSDP2, "FSDP_ACTIVATION_CHECKPOINTING": "true"})
    assert adapt_spec(RunSpec(), asked).model.activation_checkpointing == "none"
    spec = read_spec(sets=["model.activation_checkpointing=selective"]).resolve()
    with pytest.raises(
        SpecError, match=r"asked for twice: model.activation_checkpointing selective and fsdp_activation"
    ):
        adapt_spec(spec, asked)


@pytest.mark.parametrize("name", ["TP", "CP", "SP"])
def test_dimensions_that_the_loop_does_not_have(name: str) -> None:
    asked = Asked.from_environment({**FSDP2, f"PARALLELISM_CONFIG_{name}_SIZE": "2"})
    with pytest.raises(SpecError, match=f"parallelism_config {name.lower()}_size 2 in the accelerate YAML"):
        adapt_spec(RunSpec(), asked)


def test_a_batch_that_the_world_of_the_launch_does_not_divide() -> None:
    asked = Asked.from_environment({"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"})
    with pytest.raises(SpecError, match="batch_size 32 does not divide by 3 processes"):
        adapt_spec(RunSpec(), asked)


def test_what_the_file_overrules_is_told_by_key() -> None:
    asked = Asked.from_environment({**FSDP1, "FSDP_SHARDING_STRATEGY": "NO_SHARD", "FSDP_OFFLOAD_PARAMS": "true"})
    lines = overruled(RunSpec(), asked)
    assert [line.partition(" in the accelerate YAML, which decides")[0] for line in lines] == [
        "fsdp.version is 2 in the specification, 1",
        "fsdp.sharding_strategy is FULL_SHARD in the specification, NO_SHARD",
        "fsdp.cpu_offload is False in the specification, True",
    ]
    adapted = adapt_spec(RunSpec(), asked)
    assert overruled(adapted, asked) == []
    assert adapted.distributed.processes_per_machine == 4


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({**FSDP1, "FSDP_RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP"}, "write fsdp_sharding_strategy: SHARD_GRAD_OP"),
        ({**FSDP2, "FSDP_SHARDING_STRATEGY": "4"}, "asks for HYBRID_SHARD, which version 2 ignores: FULL_SHARD runs"),
        ({**FSDP2, "FSDP_SHARDING_STRATEGY": "NO_SHARD"}, "set fsdp_reshard_after_forward or parallelism_config"),
        ({**FSDP1, "FSDP_RESHARD_AFTER_FORWARD": "FULL_SHARD"}, None),
        ({**FSDP1, "FSDP_RESHARD_AFTER_FORWARD": "true"}, None),
        ({**FSDP2, "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP", "FSDP_RESHARD_AFTER_FORWARD": "false"}, None),
        ({**FSDP2, "FSDP_SHARDING_STRATEGY": "7"}, "asks for 7, which version 2 ignores"),
    ],
)
def test_wishes_that_accelerate_does_not_read(variables: dict[str, str], words: str | None) -> None:
    contradiction = Asked.from_environment(variables).contradiction
    if words is None:
        assert contradiction is None
    else:
        assert contradiction is not None
        assert words in contradiction


# --- What CPUs do differently ----------------------------------------------------------------------------------------

KEYS = {
    "single": ["device", "mixed_precision"],
    "ddp": ["device", "distributed.backend", "mixed_precision"],
    "fsdp": ["device", "distributed.backend", "mixed_precision"],
    "fsdp_cpu_offload": ["device", "distributed.backend", "mixed_precision", "fsdp_offload_params"],
    "fsdp1_full_shard": [
        *("device", "distributed.backend", "mixed_precision"),
        *("fsdp_sync_module_states", "fsdp_cpu_ram_efficient_loading"),
    ],
    "fsdp1_hybrid_shard": [
        *("device", "distributed.backend", "mixed_precision"),
        *("fsdp_sync_module_states", "fsdp_cpu_ram_efficient_loading", "fsdp_sharding_strategy"),
    ],
    "fsdp1_cpu_offload": [
        *("device", "distributed.backend", "mixed_precision"),
        *("fsdp_sync_module_states", "fsdp_cpu_ram_efficient_loading", "fsdp_offload_params"),
    ],
}


@pytest.mark.parametrize(("name", "keys"), KEYS.items())
def test_substitutions_of_a_strategy(name: str, keys: list[str]) -> None:
    asked, _, exported = asked_by(STRATEGIES[name])
    assert [item.key for item in substitutions(asked, "auto", False, exported)] == keys


def test_what_was_asked_for_as_cpus_do_it_is_no_substitution() -> None:
    asked, _, exported = asked_by(STRATEGIES["fsdp1_full_shard"], "fsdp.cpu_ram_efficient_loading=false")
    found = [item.key for item in substitutions(asked, "gloo", True, {**exported, "FSDP_SYNC_MODULE_STATES": "false"})]
    assert found == ["device"]
    found = [item.key for item in substitutions(replace(asked, mixed_precision="no"), "nccl", False, exported)]
    assert found == ["device", "distributed.backend", "fsdp_sync_module_states"]


def test_a_substitution_names_both_and_why() -> None:
    asked, _, exported = asked_by(STRATEGIES["single"])
    asked = replace(asked, mixed_precision="fp16")
    precision = substitutions(asked, "auto", False, exported)[1]
    assert str(precision).startswith("mixed_precision: fp16 -> no (16-bit products are emulated on CPUs")
    assert precision.to_dict() == {
        "key": "mixed_precision",
        "asked": "fp16",
        "got": "no",
        "reason": precision.reason,
    }


def test_every_row_is_reached_by_a_strategy() -> None:
    reached: set[Substitution] = set()
    for strategy in CATALOGUE:
        asked, _, exported = asked_by(strategy)
        reached |= set(substitutions(asked, "auto", False, exported))
    assert reached == {row.substitution() for row in table.TABLE}


# --- Errors, files, secrets ------------------------------------------------------------------------------------------


def test_a_problem_says_where_and_what_to_do() -> None:
    assert str(Problem("m", path="f", line=3, hint="h")) == "f:3: m (h)"
    assert str(Problem("m", path="f")) == "f: m"
    assert str(Problem("m", line=3)) == "m"


def test_an_error_of_the_system_is_one_line() -> None:
    assert str(of_the_system(OSError(28, "No space left on device", "f"))) == "f: No space left on device"
    assert str(of_the_system(OSError("odd"))) == "odd"
    assert len(str(of_the_system(OSError(36, "File name too long", "x" * 5000)))) < 250


def test_a_training_error_knows_its_step() -> None:
    error = TrainingError("not finite", hint="lower it", step=7)
    assert (str(error), error.step, error.exit_code) == ("not finite (lower it)", 7, 2)
    assert TrainingError("x").step is None


def test_fsync_takes_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    opened: list[int] = []

    def record(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        opened.append(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    file = tmp_path / "f"
    file.write_text("x")
    fsync(file)
    fsync(tmp_path)
    assert synced == [str(file), str(tmp_path)]
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    with pytest.raises(FileNotFoundError):
        fsync(tmp_path / "gone")


def test_secrets_are_hidden_wherever_they_stand() -> None:
    assert redact_variables({"HF_TOKEN": "t", "PROXY": "http://me:p@host", "data.max_tokens": "9"}) == {
        "HF_TOKEN": "***",
        "PROXY": "http://***@host",
        "data.max_tokens": "9",
    }
    command = ["s.py", "--api-key", "t", "--hf-token=t", "--set", "data.max_tokens=9", "http://me@host"]
    assert redact_command(command) == [
        *("s.py", "--api-key", "***", "--hf-token=***", "--set", "data.max_tokens=9", "http://***@host")
    ]
