"""What a file means, worked out here, against what Accelerate's own launcher exports for it."""

import textwrap
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_parallel.accelerate_yaml import environment, loads, render_file
from accel_parallel.accelerate_yaml.environment import FSDP_DEFAULTS
from accel_parallel.errors import LaunchError
from accel_parallel.spec import read_spec
from accel_parallel.strategies import CATALOGUE, Strategy
from tests.workers import launcher_environment

NOT_TOLD = ("MASTER_", "OMP_", "KMP_")
"""Where the processes meet, and their threads."""
TYPE = "distributed_type: FSDP\nnum_processes: 4\n"


def exported(text: str) -> dict[str, str]:
    """By the real launcher."""
    return {key: value for key, value in launcher_environment(text).items() if not key.startswith(NOT_TOLD)}


@pytest.mark.parametrize("sets", [[], ["distributed.mixed_precision=no", "fsdp.cpu_ram_efficient_loading=false"]])
@pytest.mark.parametrize("strategy", CATALOGUE, ids=lambda strategy: strategy.name)
def test_every_strategy(strategy: Strategy, sets: list[str]) -> None:
    machines = strategy.min_machines
    sets = [*sets, f"distributed.num_machines={machines}", "distributed.main_process_ip=127.0.0.1"]
    text = render_file(strategy.resolve(read_spec(sets=sets)), strategy)
    found = environment(loads(text))
    assert found == exported(text)
    assert ("ACCELERATE_USE_FSDP" in found) == strategy.name.startswith("fsdp")


HAND_MADE = {
    "integer sharding strategy": TYPE + "fsdp_config: {fsdp_sharding_strategy: 2}",
    "keys without their prefix": TYPE + "fsdp_config: {version: 2, offload_params: true, min_num_params: 2000}",
    "a key with and without its prefix": TYPE + "fsdp_config: {fsdp_version: 1, version: 2}",
    "fsdp_config that is a string": TYPE + "fsdp_config: full_shard auto_wrap",
    "fsdp_config that is empty": TYPE + "fsdp_config:",
    "no fsdp_config": TYPE,
    "fsdp without a version": TYPE + "fsdp_config: {fsdp_auto_wrap_policy: SIZE_BASED_WRAP}",
    "a version that is text": TYPE + "fsdp_config: {fsdp_version: '2'}",
    "booleans": TYPE
    + "fsdp_config: {fsdp_reshard_after_forward: no, fsdp_offload_params: on, fsdp_use_orig_params: 'True',"
    + " fsdp_forward_prefetch: TRUE, fsdp_activation_checkpointing: yes}",
    "nulls": TYPE + "fsdp_config: {fsdp_auto_wrap_policy: null, fsdp_min_num_params: null, fsdp_version: 2}",
    "a list of classes": TYPE + "fsdp_config: {fsdp_transformer_layer_cls_to_wrap: [A, B]}",
    "keys that nobody knows": TYPE + "fsdp_config: {fsdp_new: 1, new: 2}",
    "ignored modules": TYPE + "fsdp_config: {fsdp_ignored_modules: 'head.*'}",
    "neither efficient loading nor synchronised": TYPE
    + "fsdp_config: {fsdp_cpu_ram_efficient_loading: false, fsdp_sync_module_states: false}",
    "dynamo_config": TYPE + "dynamo_config: {dynamo_backend: inductor, dynamo_mode: reduce-overhead}",
    "dynamo_config without prefixes": TYPE + "dynamo_config: {backend: EAGER, use_fullgraph: true, use_dynamic: true}",
    "dynamo_config that is a string": TYPE + "dynamo_config: INDUCTOR",
    "dynamo_backend of old files": TYPE + "dynamo_backend: INDUCTOR\ndynamo_config: {dynamo_mode: max-autotune}",
    "no dynamo, in old files": TYPE + "dynamo_backend: 'NO'",
    "gpu_ids": "distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: 0,1",
    "one gpu of several machines": "distributed_type: MULTI_GPU\nnum_processes: 2\nnum_machines: 2\ngpu_ids: '0'\n"
    + "main_process_ip: 127.0.0.1",
    "all gpus": "distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: all",
    "debug": TYPE + "debug: true",
    "not debug": TYPE + "debug: false",
    "context": TYPE
    + "fsdp_config: {fsdp_version: 2}\nparallelism_config: {parallelism_config_cp_size: 2,"
    + " parallelism_config_dp_shard_size: 2, parallelism_config_cp_comm_strategy: alltoall}",
    "context as usual": TYPE + "parallelism_config: {parallelism_config_cp_size: 4}",
    "sequence": TYPE
    + "parallelism_config: {parallelism_config_sp_size: 4, parallelism_config_sp_seq_length: 128,"
    + " parallelism_config_sp_seq_length_is_variable: false}",
    "sequence as usual": TYPE + "parallelism_config: {parallelism_config_sp_size: 4}",
    "tensor": TYPE + "parallelism_config: {parallelism_config_tp_size: 2, parallelism_config_dp_shard_size: 2}",
    "parallelism_config without prefixes": TYPE + "parallelism_config: {dp_shard_size: 4}",
    "parallelism_config that is empty": TYPE + "parallelism_config: {}",
    "parallelism_config that is a string": TYPE + "parallelism_config: hsdp",
    "parallelism_config under NO": "distributed_type: 'NO'\nparallelism_config: {parallelism_config_tp_size: 2}",
    "parallelism_config under DDP": "distributed_type: MULTI_GPU\nnum_processes: 2\n"
    + "parallelism_config: {parallelism_config_dp_replicate_size: 2}",
    "NO unquoted": "distributed_type: NO\nnum_processes: 1",
    "NO on a CPU": "distributed_type: 'NO'\nuse_cpu: true",
    "NO on a CPU, as text": "distributed_type: 'NO'\nuse_cpu: 'false'",
    "DDP on CPUs": "distributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: true",
    "no mixed_precision": "distributed_type: MULTI_GPU\nnum_processes: 2",
    "empty mixed_precision": TYPE + "mixed_precision:",
    "mixed_precision in capitals": TYPE + "mixed_precision: BF16",
    "fp16 of old files": TYPE + "fp16: true",
    "mixed_precision and fp16": TYPE + "fp16: true\nmixed_precision: 'no'",
    "another section": TYPE + "deepspeed_config: {zero_stage: 3}\nfp8_config: {backend: TE}\nenable_cpu_affinity: true",
}


@pytest.mark.parametrize("text", HAND_MADE.values(), ids=HAND_MADE)
def test_files_of_other_people(text: str) -> None:
    assert environment(loads(text)) == exported(text)


def test_the_hand_made_files_differ() -> None:
    """None of them is there for nothing: the section that it is about changes what is exported, or is known not to."""
    plain = exported(TYPE)
    same = {name for name, text in HAND_MADE.items() if text.startswith(TYPE) and exported(text) == plain}
    assert same == {
        *("no fsdp_config", "fsdp_config that is a string", "fsdp_config that is empty", "keys that nobody knows"),
        *("dynamo_config that is a string", "no dynamo, in old files", "not debug", "empty mixed_precision"),
        *("parallelism_config that is empty", "mixed_precision and fp16", "another section"),
    }


WORDS = st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "TRANSFORMER_BASED_WRAP", "Block,Head", "a 'b' \"c\"", "true"])
VALUES = st.one_of(st.booleans(), st.none(), st.integers(0, 5), st.integers(0, 10**12), WORDS, st.text(max_size=5))
KEYS = st.sampled_from([*FSDP_DEFAULTS, *(key.removeprefix("fsdp_") for key in FSDP_DEFAULTS), "fsdp_other", "other"])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(KEYS, VALUES, max_size=12), st.sampled_from(["no", "bf16", "fp16", None]))
def test_any_fsdp_section(section: dict[str, Any], precision: str | None) -> None:
    config = {"distributed_type": "FSDP", "num_processes": 2, "mixed_precision": precision, "fsdp_config": section}
    text = yaml.safe_dump(config)
    try:
        theirs: dict[str, str] | str = exported(text)
    except ValueError as error:
        theirs = str(error)
    try:
        assert environment(loads(text)) == theirs
    except LaunchError as error:
        assert "needs fsdp_sync_module_states" in str(error)
        assert "fsdp_sync_module_states" in str(theirs)
        assert isinstance(theirs, str), "Accelerate takes it"


# --- What is refused --------------------------------------------------------------------------------------------------

REFUSED = {
    "fsdp_config: {fsdp_sync_module_states: false}": "needs fsdp_sync_module_states",
    "fsdp_config: {sync_module_states: false, fsdp_cpu_ram_efficient_loading: true}": "set both to true, or both",
    "mixed_precision: no": "mixed_precision is False, and should be text (put it in quotes)",
    "mixed_precision: fp32": "mixed_precision is 'fp32', and should be one of no, fp16, bf16, fp8",
    "mixed_precision: pf16": "mixed_precision is 'pf16', and should be one of no, fp16, bf16, fp8; did you mean",
    "mixed_precision: ''": "mixed_precision is '', and should be one of",
    "gpu_ids: 0": "gpu_ids is 0, and should be text (put it in quotes)",
    "dynamo_backend: no": "dynamo_backend is False, and should be text",
    "dynamo_config: {dynamo_backend: 1}": "dynamo_backend is 1, and should be text",
    "parallelism_config: {parallelism_config_cp_size: two}": "parallelism_config_cp_size is 'two', and should be",
    "parallelism_config: {parallelism_config_sp_size: }": "parallelism_config_sp_size is None, and should be a whole",
}


@pytest.mark.parametrize(("line", "words"), REFUSED.items())
def test_what_the_launcher_refuses_is_refused(line: str, words: str) -> None:
    with pytest.raises(LaunchError) as caught:
        environment(loads(TYPE + line))
    assert words in str(caught.value)
    with pytest.raises((ValueError, TypeError, AttributeError)):
        launcher_environment(TYPE + line)


def test_a_gpu_alone_is_refused_under_ddp() -> None:
    text = "distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: '1'"
    with pytest.raises(LaunchError, match="MULTI_GPU needs at least two, or all"):
        environment(loads(text))
    with pytest.raises(ValueError, match="Less than two GPU ids"):
        launcher_environment(text)


def test_a_size_that_only_the_workers_would_refuse() -> None:
    with pytest.raises(LaunchError, match=r"dp_replicate_size is 1\.5, and should be a whole number"):
        environment(loads(TYPE + "parallelism_config: {parallelism_config_dp_replicate_size: 1.5}"))


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "MULTI_CPU", "MULTI_XPU", "XLA", "null", "[FSDP]"])
def test_other_types_are_refused(kind: str) -> None:
    with pytest.raises(LaunchError, match="the training loop runs under NO, MULTI_GPU or FSDP"):
        environment(loads(f"distributed_type: {kind}\nnum_processes: 2\n"))


@pytest.mark.parametrize("word", ["fp8", "FP8"])
def test_fp8_is_refused(word: str) -> None:
    with pytest.raises(LaunchError, match="mixed_precision fp8: the training loop does no or bf16"):
        environment(loads(f"{TYPE}mixed_precision: {word}\n"))


def test_the_file_is_not_changed() -> None:
    config = loads(
        textwrap.dedent("""\
        distributed_type: FSDP
        fsdp_config: {version: 2}
        dynamo_config: {backend: EAGER}
        parallelism_config: {parallelism_config_sp_size: 2}
        """)
    )
    before = yaml.safe_dump(config)
    environment(config)
    assert yaml.safe_dump(config) == before
