"""The check that what runs is what was asked for must be able to fail: every mismatch is forced for real and read."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accel_parallel.asked import Asked, Parallelism
from accel_parallel.train.runtime.check import mismatches
from accel_parallel.train.runtime.observe import Observed, Original, clean_name
from tests.workers import Trained, run_processes, train

# --- Forced in real processes -----------------------------------------------------------------------------------------


def refused(result: Trained) -> str:
    assert set(result.exit_codes) == {1}, result.log
    assert not (result.run / "metrics.jsonl").read_text(), "nothing was trained"
    assert "what runs is not what was asked for" in result.message
    return result.message


def sabotaged(tmp_path: Path, toy: list[str], name: str, strategy: str = "fsdp") -> Trained:
    """Train with one function of the runtime replaced in every worker (see tests/sabotage.py)."""
    return train(tmp_path / "run", strategy, 2, toy, environment={"ACCELERATE_TEST_SABOTAGE": name})


def test_fsdp_asked_and_ddp_running(toy: list[str], tmp_path: Path) -> None:
    message = refused(sabotaged(tmp_path, toy, "no promotion to FSDP"))
    assert "asked for fsdp version 2, got ddp" in message


def test_processes_that_do_not_know_each_other(toy: list[str], tmp_path: Path) -> None:
    result = sabotaged(tmp_path, toy, "no process group", "ddp")
    assert result.exit_codes == [1, 1]
    assert "asked for 2 processes, got 1" in result.message
    assert not result.run.exists(), "each of them would have taken it for its own"


def test_nothing_wrapped(toy: list[str], tmp_path: Path) -> None:
    message = refused(sabotaged(tmp_path, toy, "no wrapping"))
    assert "asked to wrap every TransformerBlock: the model has 3, 0 are units" in message


def test_threshold_above_every_module(toy: list[str], tmp_path: Path) -> None:
    """In a file that somebody wrote by hand: ours would not ask for units by size then."""
    environment = {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "50000000"}
    message = refused(train(tmp_path / "run", "fsdp", 2, toy, environment=environment))
    assert "no module reaches the threshold" in message
    assert "lower fsdp.min_num_params" in message


def test_wrong_precision(toy: list[str], tmp_path: Path) -> None:
    message = refused(sabotaged(tmp_path, toy, "precision lost"))
    assert "asked for mixed_precision bf16, matrix products run in float32" in message


def test_untied_weights(toy: list[str], tmp_path: Path) -> None:
    """What Accelerate does to a tied model without `tie_weights` when it loads RAM-efficiently."""
    message = refused(sabotaged(tmp_path, toy, "no tie_weights"))
    assert "tied weights came apart (token_emb.weight = head.weight)" in message


def test_parameters_not_given_back(toy: list[str], tmp_path: Path) -> None:
    message = refused(sabotaged(tmp_path, toy, "kept after forward"))
    assert "asked for FULL_SHARD, but units kept their full parameters after the forward pass" in message


# --- The comparison itself --------------------------------------------------------------------------------------------

ENVIRONMENT = {
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "TransformerBlock",
}
ORIGINAL = Original(100, {"w": (10, 10)}, {"TransformerBlock": 2}, (("token_emb.weight", "head.weight"),), ())
GOOD = Observed(
    parallelism=Parallelism.FSDP2,
    world_size=4,
    local_elements=30,
    largest_promised_shard=30,
    units={"": "TransformerLM", "blocks.0": "TransformerBlock", "blocks.1": "TransformerBlock", "norm": "RMSNorm"},
    compute_dtypes=frozenset({torch.bfloat16}),
    resharded_after_forward=True,
    tied=(("token_emb.weight", "head.weight"),),
)


def test_what_was_asked_passes() -> None:
    assert mismatches(Asked.from_environment(ENVIRONMENT), GOOD, ORIGINAL, "bf16") == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parallelism": Parallelism.FSDP1}, "got fsdp version 1"),
        ({"parallelism": Parallelism.DDP}, "got ddp"),
        ({"world_size": 1}, "got 1 in this process group"),
        ({"local_elements": 100}, "at most 30 of 100 parameters each; this process holds 100"),
        ({"units": {"": "TransformerLM", "norm": "RMSNorm"}}, "the model has 2, 0 are units"),
        ({"compute_dtypes": frozenset({torch.float32})}, "run in float32"),
        ({"compute_dtypes": frozenset({torch.float32, torch.bfloat16})}, "run in bfloat16, float32"),
        ({"resharded_after_forward": False}, "kept their full parameters"),
        ({"tied": ()}, "came apart"),
    ],
)
def test_each_difference_is_one_line(change: dict[str, object], words: str) -> None:
    found = mismatches(Asked.from_environment(ENVIRONMENT), replace(GOOD, **change), ORIGINAL, "bf16")  # type: ignore[arg-type]
    assert len(found) == 1
    assert words in found[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, "asks for HYBRID_SHARD, which version 2 ignores"),
        ({"FSDP_SHARDING_STRATEGY": "2"}, "asks for SHARD_GRAD_OP, which version 2 ignores"),
        (
            {"FSDP_VERSION": "1", "FSDP_RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP"},
            "asks for SHARD_GRAD_OP, which version 1 ignores",
        ),
    ],
)
def test_wishes_that_accelerate_does_not_read(change: dict[str, str], words: str) -> None:
    contradiction = Asked.from_environment({**ENVIRONMENT, **change}).contradiction
    assert contradiction is not None
    assert words in contradiction


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, "single"),
        ({"WORLD_SIZE": "2"}, "ddp"),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "ddp"),
        (ENVIRONMENT, "fsdp"),
        ({**ENVIRONMENT, "FSDP_RESHARD_AFTER_FORWARD": "false"}, "fsdp_shard_grad_op"),
        ({**ENVIRONMENT, "FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_cpu_offload"),
        ({**ENVIRONMENT, "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, "fsdp_hybrid_shard"),
        ({**ENVIRONMENT, "FSDP_VERSION": "1"}, "fsdp1_full_shard"),
        ({**ENVIRONMENT, "FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "NO_SHARD"}, "fsdp1_no_shard"),
    ],
)
def test_the_environment_names_its_strategy(environment: dict[str, str], name: str) -> None:
    assert Asked.from_environment(environment).strategy_name == name


def test_hybrid_shards_over_a_part_of_the_world() -> None:
    asked = Asked.from_environment({**ENVIRONMENT, "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"})
    assert asked.shard_size == 2


def test_names_lose_what_wrappers_add() -> None:
    assert clean_name("module.blocks.0.attn") == "blocks.0.attn"
    assert clean_name("_fsdp_wrapped_module.blocks.1._fsdp_wrapped_module.ffn") == "blocks.1.ffn"


# --- The private attribute --------------------------------------------------------------------------------------------


def _promoted() -> list[str]:
    import accelerate
    from accelerate import Accelerator, PartialState

    from accel_parallel.train.runtime import cpu

    asked = Asked.from_environment({**ENVIRONMENT, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    cpu.prepare_environment(asked, keep_precision=False)
    before = PartialState(cpu=True).distributed_type
    cpu.promote_to_fsdp()
    accelerator = Accelerator()
    result = [accelerate.__version__, str(before), str(accelerator.distributed_type), str(accelerator.device)]
    accelerator.end_training()
    return result


def test_accelerate_still_keeps_its_type_where_the_runtime_changes_it() -> None:
    """Pins PartialState._shared_state, the one private attribute; verified on accelerate 1.15."""
    results = run_processes(_promoted, {**ENVIRONMENT}, 2)
    for kind, result in results:
        assert kind == "ok", result
        version, before, after, device = result
        assert before == "DistributedType.MULTI_CPU", version
        assert after == "DistributedType.FSDP", version
        assert device == "cpu"


# --- A specification and a YAML that was not brought up to date -----------------------------------------------------


def test_the_yaml_decides_and_what_it_overrules_is_said(toy: list[str], tmp_path: Path) -> None:
    """Edited the specification, forgot `accel-parallel config`: the old YAML runs; the run says and records it."""
    environment = {"FSDP_RESHARD_AFTER_FORWARD": "false"}
    result = train(tmp_path / "run", "fsdp", 2, toy, environment=environment, argv=["--stop-at", "2"])
    assert result.exit_codes == [0, 0], result.errors
    line = (
        "fsdp.sharding_strategy is FULL_SHARD in the specification, SHARD_GRAD_OP in the accelerate YAML, which decides"
    )
    assert line in result.log
    assert result.environment["overruled"][0].startswith(line)
    assert "sharding_strategy: SHARD_GRAD_OP" in (result.run / "spec.yaml").read_text()


def test_precision_that_this_loop_does_not_do_is_refused(toy: list[str], tmp_path: Path) -> None:
    result = train(tmp_path / "run", "ddp", 2, toy, environment={"ACCELERATE_MIXED_PRECISION": "fp16"})
    assert result.exit_codes == [2, 2]
    assert "mixed_precision fp16 in the accelerate YAML: this loop trains with no or bf16" in result.message
    assert not result.run.exists()
