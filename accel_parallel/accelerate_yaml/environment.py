"""What Accelerate's launcher exports to each worker for a file, worked out without starting it.

`accelerate launch` reads the YAML and passes it on as environment variables; torchrun passes none. So under torchrun
the environment has to carry the strategy. Restates accelerate/utils/launch.py, `prepare_multi_gpu_env` and
`prepare_simple_launcher_cmd_env`, with the defaults of commands/launch.py (1.15); a test compares the two.
"""

from typing import Any

from accel_parallel.accelerate_yaml.render import Config
from accel_parallel.errors import LaunchError

# What the launcher takes for keys of fsdp_config that are left out; None is not exported.
FSDP_DEFAULTS: dict[str, Any] = {
    "fsdp_version": "1",
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_reshard_after_forward": True,
    "fsdp_offload_params": False,
    "fsdp_min_num_params": 100_000_000,
    "fsdp_auto_wrap_policy": None,
    "fsdp_transformer_layer_cls_to_wrap": None,
    "fsdp_backward_prefetch": None,
    "fsdp_state_dict_type": None,
    "fsdp_forward_prefetch": False,
    "fsdp_use_orig_params": True,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_sync_module_states": True,
    "fsdp_activation_checkpointing": False,
    "fsdp_activation_checkpointing_offload": False,
    "fsdp_ignored_modules": None,
}
# Exported as Python writes them; all other truth values in lower case.
_AS_WRITTEN = {"fsdp_version", "fsdp_sharding_strategy", "fsdp_min_num_params", "fsdp_auto_wrap_policy",
               "fsdp_transformer_layer_cls_to_wrap", "fsdp_backward_prefetch", "fsdp_state_dict_type",
               "fsdp_ignored_modules"}  # fmt: skip
_EXPORTED_AS = {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
PARALLELISM_DEFAULTS: dict[str, Any] = {
    "parallelism_config_dp_replicate_size": 1,
    "parallelism_config_dp_shard_size": 1,
    "parallelism_config_tp_size": 1,
    "parallelism_config_cp_size": 1,
    "parallelism_config_cp_backend": "torch",
    "parallelism_config_sp_size": 1,
    "parallelism_config_sp_backend": "deepspeed",
}
# Exported only where the size that they belong to is larger than 1.
_CONTEXT_DEFAULTS: dict[str, Any] = {"parallelism_config_cp_comm_strategy": "allgather"}
_SEQUENCE_DEFAULTS: dict[str, Any] = {
    "parallelism_config_sp_seq_length": None,
    "parallelism_config_sp_seq_length_is_variable": True,
    "parallelism_config_sp_attn_implementation": "sdpa",
}
DYNAMO_DEFAULTS: dict[str, Any] = {
    "dynamo_mode": "default",
    "dynamo_use_fullgraph": False,
    "dynamo_use_dynamic": False,
    "dynamo_use_regional_compilation": False,
}
_PROCESSES = ("NO", "MULTI_GPU", "FSDP")


def environment(config: Config) -> dict[str, str]:
    """The variables that decide how a worker trains; without ranks, rendezvous and OMP_NUM_THREADS.

    Raises LaunchError for a `distributed_type` other than NO, MULTI_GPU and FSDP, or what the launcher refuses.
    """
    kind = "NO" if config.get("distributed_type") is False else str(config.get("distributed_type"))
    if kind not in _PROCESSES:
        raise LaunchError(f"distributed_type {kind}: only {', '.join(_PROCESSES)} are carried by an environment")
    if str(config.get("mixed_precision")).lower() == "fp8":
        raise LaunchError("mixed_precision fp8 is not carried by an environment here; launch the file itself")
    result = {"ACCELERATE_MIXED_PRECISION": str(config.get("mixed_precision") or "no").lower(), **_dynamo(config)}
    if kind == "NO":
        result["ACCELERATE_USE_CPU"] = str(bool(config.get("use_cpu", False)))
    if config.get("debug"):
        result["ACCELERATE_DEBUG_MODE"] = "true"
    if config.get("gpu_ids") not in (None, "all"):
        result["CUDA_VISIBLE_DEVICES"] = str(config["gpu_ids"])
    if kind == "FSDP":
        result |= _fsdp(config)
    sizes = config.get("parallelism_config") or {}
    if sizes and kind != "NO":
        result["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        result |= {key.upper(): str(value) for key, value in _parallelism(sizes).items()}
    return result


def _parallelism(sizes: Config) -> Config:
    defaults = PARALLELISM_DEFAULTS
    if int(sizes.get("parallelism_config_cp_size", 1)) > 1:
        defaults = defaults | _CONTEXT_DEFAULTS
    if int(sizes.get("parallelism_config_sp_size", 1)) > 1:
        defaults = defaults | _SEQUENCE_DEFAULTS
    return {key: sizes.get(key, default) for key, default in defaults.items()}


def _fsdp(config: Config) -> dict[str, str]:
    section = config.get("fsdp_config")
    # A section that is not a mapping is not read at all.
    given = section if isinstance(section, dict) else {}
    values = FSDP_DEFAULTS | {key if key.startswith("fsdp") else f"fsdp_{key}": value for key, value in given.items()}
    if values["fsdp_cpu_ram_efficient_loading"] and not values["fsdp_sync_module_states"]:
        raise LaunchError(
            "fsdp_cpu_ram_efficient_loading (left out: true) needs fsdp_sync_module_states",
            hint="Accelerate refuses the file: set both to true, or both to false",
        )
    result = {"ACCELERATE_USE_FSDP": "true"}
    for key in FSDP_DEFAULTS:
        value = values[key]
        optional = FSDP_DEFAULTS[key] is None
        if not (optional and value is None):
            text = str(value) if key in _AS_WRITTEN else str(value).lower()
            result[_EXPORTED_AS.get(key, key.upper())] = text
    return result


def _dynamo(config: Config) -> dict[str, str]:
    given = config.get("dynamo_config") or {}
    values = {key if key.startswith("dynamo_") else f"dynamo_{key}": value for key, value in given.items()}
    backend = str(values.get("dynamo_backend") or "no").upper()
    rest = {f"ACCELERATE_{key.upper()}": str(values.get(key, default)) for key, default in DYNAMO_DEFAULTS.items()}
    return {"ACCELERATE_DYNAMO_BACKEND": backend, **rest}
