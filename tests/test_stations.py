"""What becomes of the keys of a file: planted keys that do nothing are found, the generated files have none."""

import logging
import os
import sys
from pathlib import Path

import pytest
import torch
from accelerate.commands import launch as commands
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DeepSpeedPlugin

from accel_parallel.errors import LaunchError
from accel_parallel.strategies import STRATEGIES
from accel_parallel.train.stations import Station, processes_started, state_of, stations

CONFIGS = Path(__file__).parent.parent / "accelerate_configs"
NEVER_LEAVES = "never leaves the file"
UNREAD = "reaches the environment, and nothing reads it there"
FSDP = "distributed_type: FSDP\nnum_processes: 4\n"
DDP = "distributed_type: MULTI_GPU\nnum_processes: 2\n"
DEEPSPEED = "distributed_type: DEEPSPEED\nnum_processes: 2\n"
SIZES = "parallelism_config: {parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 2}\n"


def of(folder: Path, text: str) -> dict[str, Station]:
    path = folder / "config.yaml"
    path.write_text(text)
    return {station.key: station for station in stations(path)}


@pytest.mark.parametrize("name", STRATEGIES)
def test_generated_files_have_no_dead_key(name: str) -> None:
    # One process is what the launcher starts for 'NO' in any case.
    found = stations(CONFIGS / f"{name}.yaml")
    assert [station.key for station in found if station.dead] == (["num_processes"] if name == "single" else [])


# The keys that are dead, with how far they come and what was meant. All other keys of the file are alive.
PLANTED: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {
    "reshard in version 1": (
        FSDP + "fsdp_config: {fsdp_version: 1, fsdp_reshard_after_forward: SHARD_GRAD_OP}",
        {"fsdp_config.fsdp_reshard_after_forward": (UNREAD, "")},
    ),
    "strategy in version 2": (
        FSDP + "fsdp_config: {fsdp_version: 2, fsdp_sharding_strategy: SHARD_GRAD_OP, fsdp_use_orig_params: true}",
        {"fsdp_config.fsdp_sharding_strategy": (UNREAD, ""), "fsdp_config.fsdp_use_orig_params": (UNREAD, "")},
    ),
    "misspelt": (
        FSDP + "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_foward: false, fsdp_mixed_precision: bf16}",
        {
            "fsdp_config.fsdp_reshard_after_foward": (NEVER_LEAVES, "fsdp_reshard_after_forward"),
            "fsdp_config.fsdp_mixed_precision": (NEVER_LEAVES, ""),
        },
    ),
    "threshold of another policy": (
        FSDP + "fsdp_config: {fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, min_num_params: 20}",
        {"fsdp_config.min_num_params": (UNREAD, "")},
    ),
    "class of another policy": (
        FSDP + "fsdp_config: {fsdp_auto_wrap_policy: NO_WRAP, fsdp_transformer_layer_cls_to_wrap: A}",
        {"fsdp_config.fsdp_transformer_layer_cls_to_wrap": (UNREAD, "")},
    ),
    "renamed": (
        FSDP + "fsdp_config: {fsdp_backward_prefetch_policy: BACKWARD_PRE}",
        {"fsdp_config.fsdp_backward_prefetch_policy": (NEVER_LEAVES, "fsdp_backward_prefetch")},
    ),
    # Accelerate refuses BACKWARD_PREX here, and drops what it does not refuse.
    "checked and dropped": (
        FSDP + "fsdp_config: {fsdp_version: 2, fsdp_backward_prefetch: BACKWARD_PRE}",
        {"fsdp_config.fsdp_backward_prefetch": (UNREAD, "")},
    ),
    "given twice": (
        FSDP + "fsdp_config: {fsdp_version: 1, version: 2}",
        {"fsdp_config.fsdp_version": (NEVER_LEAVES, "")},
    ),
    "without a prefix": (FSDP + "fsdp_config: {version: 1, min_num_params: 20, auto_wrap_policy: SIZE_BASED_WRAP}", {}),
    "a section that is text": (FSDP + "fsdp_config: full_shard auto_wrap", {"fsdp_config": (NEVER_LEAVES, "")}),
    "a section of another type": (
        DDP + "fsdp_config: {fsdp_version: 2}",
        {"fsdp_config.fsdp_version": (NEVER_LEAVES, "")},
    ),
    "only options": (
        DDP
        + "same_network: true\nrdzv_backend: c10d\nenable_cpu_affinity: true\ndowncast_bf16: 'yes'\nuse_cpu: true\n",
        dict.fromkeys(
            ["same_network", "rdzv_backend", "enable_cpu_affinity", "downcast_bf16", "use_cpu"], (NEVER_LEAVES, "")
        ),
    ),
    "alive": (
        DDP + "mixed_precision: bf16\ndynamo_config: {dynamo_backend: INDUCTOR, mode: default}\n"
        "main_process_port: 29501\ngpu_ids: 0,1\ndebug: false\ncompute_environment: LOCAL_MACHINE\n",
        {},
    ),
    "sizes": (FSDP + SIZES + "fsdp_config: {fsdp_version: 2}", {}),
    "sizes without a prefix": (
        FSDP + "parallelism_config: {dp_shard_size: 4}",
        {"parallelism_config.dp_shard_size": (NEVER_LEAVES, "parallelism_config_dp_shard_size")},
    ),
    "overruled": (DEEPSPEED + "deepspeed_config: {num_processes: 6}", {"num_processes": (NEVER_LEAVES, "")}),
    "DeepSpeed's own": (
        DEEPSPEED + "deepspeed_config: {zero_stage: 3, zero3_init_flag: true, bf16: {enabled: true}}",
        {"deepspeed_config.bf16": (NEVER_LEAVES, "")},
    ),
    "processes without ranks": ("distributed_type: MULTI_CPU\nnum_processes: 2\n", {"num_processes": (UNREAD, "")}),
    "fp8": (
        DDP + "mixed_precision: fp8\nfp8_config: {backend: TE, amax_compute_algorithm: max, margin: 1}",
        {"fp8_config.amax_compute_algorithm": (UNREAD, "fp8_amax_compute_algo")},
    ),
    "Megatron-LM": (
        "distributed_type: MEGATRON_LM\nnum_processes: 4\nmegatron_lm_config: {megatron_lm_tp_degree: 2, tp_degree: 2}",
        {"megatron_lm_config.tp_degree": (NEVER_LEAVES, "megatron_lm_tp_degree")},
    ),
    # Nobody can tell what else is read once the plugin has failed, except for what does not come so far.
    "refused by every worker": (
        FSDP + "fsdp_config: {fsdp_sharding_strategy: ZERO3, fsdp_offload_params: true, fsdp_offload: true}",
        {"fsdp_config.fsdp_offload": (NEVER_LEAVES, "fsdp_offload_params")},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_dead_keys(name: str, tmp_path: Path) -> None:
    text, dead = PLANTED[name]
    found = of(tmp_path, text)
    assert {key: (s.where, s.meant) for key, s in found.items() if s.dead} == dead
    assert all(s.environment and not s.state for s in found.values() if s.dead and s.where == UNREAD)
    assert not any(s.environment or s.state for s in found.values() if s.dead and s.where == NEVER_LEAVES)


def test_what_a_key_becomes(tmp_path: Path) -> None:
    found = of(tmp_path, FSDP + "mixed_precision: bf16\nfsdp_config: {fsdp_version: 2, fsdp_offload_params: yes}\n")
    key = "fsdp_config.fsdp_offload_params"
    assert found[key].to_dict() == {
        "key": key,
        "asked": "true",
        "environment": {"FSDP_OFFLOAD_PARAMS": "true"},
        "state": {"plugin.cpu_offload": "CPUOffloadPolicy{pin_memory: True}"},
        "dead": False,
        "where": "",
        "meant": "",
    }
    assert (found["num_processes"].environment, found["num_processes"].state) == (
        {"--nproc_per_node": "4"},
        {"num_processes": "4"},
    )
    assert found["mixed_precision"].state["mixed_precision"] == "bf16"
    assert "param_dtype: torch.bfloat16" in found["mixed_precision"].state["plugin.mixed_precision_policy"]
    assert found["distributed_type"].environment["ACCELERATE_USE_FSDP"] == "true"
    assert "--nnodes" not in found["distributed_type"].environment
    assert found["fsdp_config.fsdp_version"].state["plugin.reshard_after_forward"] == "True"


def test_a_key_that_is_seen_only_by_a_refusal_says_so(tmp_path: Path) -> None:
    found = of(tmp_path, FSDP + SIZES + "fsdp_config: {fsdp_version: 2, fsdp_sync_module_states: true}\n")
    sizes = found["parallelism_config.parallelism_config_dp_shard_size"]
    assert "refused: ValueError: ParallelismConfig total_size" in sizes.where
    assert sizes.environment == {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
    assert sizes.state == {"parallelism.dp_shard_size": "2"}
    assert "--fsdp_cpu_ram_efficient_loading" in found["fsdp_config.fsdp_sync_module_states"].where
    broken = of(tmp_path, FSDP + "fsdp_config: {fsdp_sharding_strategy: ZERO3, fsdp_offload_params: true}\n")
    assert broken["fsdp_config.fsdp_offload_params"].where == "Accelerate fails as it is: KeyError: 'ZERO3'"


@pytest.mark.parametrize(
    ("text", "processes"),
    [
        ("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n", 1),
        ("distributed_type: MULTI_CPU\nnum_processes: 4\nuse_cpu: true\nmpirun_config: {mpirun_hostfile: /hosts}\n", 4),
        ("distributed_type: MULTI_GPU\nnum_processes: 7\nnum_machines: 2\nmain_process_ip: 10.0.0.1\n", 6),
        ("distributed_type: 'NO'\nnum_processes: 8\n", 1),
        (FSDP, 4),
        (DEEPSPEED + "deepspeed_config: {num_processes: 6}\n", 6),
        (DEEPSPEED.replace("2", "7") + "num_machines: 2\nmain_process_ip: 10.0.0.1\n", 6),
    ],
)
def test_processes_started(text: str, processes: int, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert processes_started(path) == processes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DDP + "gradient_accumulation_steps: 2", "refuses it: ValueError: The config file .* unknown keys"),
        ("distributed_type: FSDP", "manually pass in `--num_processes`"),
        (FSDP.replace("4", "auto"), "number of processes is 'auto'"),
        ("distributed_type: XLA\nnum_processes: 4", "TPUs"),
        (FSDP + "fsdp_config: &a {x: *a}", "holds itself"),
        ("", "AttributeError"),
        ("- 1", "AttributeError"),
        ("a: %", "ScannerError"),
    ],
)
def test_files_that_accelerate_refuses(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=message) as refusal:
        of(tmp_path, text)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(LaunchError, match="does not exist"):
        processes_started(Path("no_such_file.yaml"))


def test_state_of_an_environment() -> None:
    state = state_of({"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "fp16"})
    assert (state["distributed_type"], state["num_processes"], state["mixed_precision"]) == ("FSDP", "2", "fp16")
    assert (state["plugin.sharding_strategy"], state["gradient_accumulation_steps"]) == ("FULL_SHARD", "1")
    assert "error" not in state
    assert "torch.float16" in state["plugin.mixed_precision_policy"]
    wrapped = {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "A, B"}
    state = state_of({"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "2", **wrapped})
    assert state["plugin.transformer_cls_names_to_wrap"] == "['A', ' B']"
    assert state["plugin.auto_wrap_policy"] == "torch.distributed.fsdp.wrap.transformer_auto_wrap_policy"
    state = state_of({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "3", "FSDP_RESHARD_AFTER_FORWARD": "true"})
    assert state["error"] == "KeyError: 'TRUE'"
    assert state["dynamo.backend"] == "NO"


def test_nothing_is_left_behind_nor_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def around() -> list[object]:
        shared = (PartialState._shared_state, AcceleratorState._shared_state)
        return [
            dict(os.environ), logging.root.manager.disable, torch.backends.cuda.matmul.allow_tf32, repr(shared),
            *map(id, shared), torch.cuda.current_device, DeepSpeedPlugin.select, commands.multi_gpu_launcher,
            torch.distributed.is_initialized(), Path.cwd(), sorted(Path.cwd().iterdir()), "transformers" in sys.modules,
        ]  # fmt: skip

    before = around()
    of(tmp_path, FSDP + "dynamo_config: {dynamo_backend: INDUCTOR}\nfsdp_config: {fsdp_backward_prefetch: NO}\n")
    of(tmp_path, DEEPSPEED + "num_machines: 2\nmain_process_ip: 10.0.0.1\ndeepspeed_config: {zero_stage: 3}\n")
    assert around() == before
    assert capfd.readouterr() == ("", "")
