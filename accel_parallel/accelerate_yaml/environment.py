"""What Accelerate's launcher exports to each worker for a file, worked out without starting it.

`accelerate launch` reads the YAML and passes it on as environment variables; torchrun passes none. So under torchrun
the environment has to carry the strategy. Restates accelerate/utils/launch.py, `prepare_multi_gpu_env` and
`prepare_simple_launcher_cmd_env`, with the defaults of commands/launch.py (1.15); a test compares the two.
"""

from typing import Any

from accel_parallel.accelerate_yaml.render import Config
from accel_parallel.errors import LaunchError
from accel_parallel.suggest import did_you_mean

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
_PRECISIONS = ("no", "fp16", "bf16", "fp8")
_SCRIPT = "a script of yours may run under it: -- SCRIPT"


def environment(config: Config) -> dict[str, str]:
    """The variables that decide how a worker trains; without ranks, rendezvous and OMP_NUM_THREADS.

    Raises LaunchError for a `distributed_type` other than NO, MULTI_GPU and FSDP, for fp8, and for values on which
    the launcher itself fails.
    """
    kind = "NO" if config.get("distributed_type") is False else str(config.get("distributed_type"))
    if kind not in _PROCESSES:
        raise LaunchError(f"distributed_type {kind}: the training loop runs under NO, MULTI_GPU or FSDP", hint=_SCRIPT)
    result = {"ACCELERATE_MIXED_PRECISION": _precision(config), **_dynamo(config)}
    if kind == "NO":
        result["ACCELERATE_USE_CPU"] = str(config.get("use_cpu", False))
    if config.get("debug"):
        result["ACCELERATE_DEBUG_MODE"] = "true"
    result |= _devices(config, kind)
    if kind == "FSDP":
        result |= _fsdp(config)
    sizes = config.get("parallelism_config")
    if sizes not in (None, {}) and kind != "NO":
        result["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        result |= {key.upper(): str(value) for key, value in _parallelism(_section(sizes)).items()}
    return result


def _precision(config: Config) -> str:
    # fp16: true is how old files say it.
    value = config.get("mixed_precision", "fp16" if config.get("fp16") else None)
    word = "no" if value is None else _word("mixed_precision", value).lower()
    if word not in _PRECISIONS:
        known = f"one of {', '.join(_PRECISIONS)}{did_you_mean(word, _PRECISIONS)}"
        raise LaunchError(f"mixed_precision is {value!r}, and should be {known}")
    if word == "fp8":
        raise LaunchError("mixed_precision fp8: the training loop does no or bf16", hint=_SCRIPT)
    return word


def _devices(config: Config, kind: str) -> dict[str, str]:
    gpu_ids = config.get("gpu_ids")
    if gpu_ids is None or _word("gpu_ids", gpu_ids) == "all":
        return {}
    if kind == "MULTI_GPU" and "," not in gpu_ids and config.get("num_machines", 1) == 1:
        raise LaunchError(f"gpu_ids {gpu_ids!r}: MULTI_GPU needs at least two, or all")
    return {"CUDA_VISIBLE_DEVICES": gpu_ids}


def _word(key: str, value: Any) -> str:
    """The launcher fails on anything but text here, such as an unquoted no, which YAML reads as a boolean."""
    if not isinstance(value, str):
        raise LaunchError(f"{key} is {value!r}, and should be text", hint="put it in quotes")
    return value


def _section(value: Any, prefix: str = "") -> Config:
    """The keys of a section, each with its prefix. A section that is not a mapping is not read at all."""
    names = {str(key): inner for key, inner in value.items()} if isinstance(value, dict) else {}
    return {name if name.startswith(prefix) else f"{prefix}_{name}": inner for name, inner in names.items()}


def _parallelism(sizes: Config) -> Config:
    defaults = PARALLELISM_DEFAULTS
    for key in (key for key in defaults if key.endswith("_size")):
        if not str(sizes.get(key, 1)).isdecimal():
            raise LaunchError(f"{key} is {sizes[key]!r}, and should be a whole number")
    if int(sizes.get("parallelism_config_cp_size", 1)) > 1:
        defaults = defaults | _CONTEXT_DEFAULTS
    if int(sizes.get("parallelism_config_sp_size", 1)) > 1:
        defaults = defaults | _SEQUENCE_DEFAULTS
    return {key: sizes.get(key, default) for key, default in defaults.items()}


def _fsdp(config: Config) -> dict[str, str]:
    values = FSDP_DEFAULTS | _section(config.get("fsdp_config"), "fsdp")
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
    values = _section(config.get("dynamo_config"), "dynamo")
    if "dynamo_backend" in config:  # how old files say it
        values = {"dynamo_backend": config["dynamo_backend"]}
    backend = values.get("dynamo_backend")
    backend = "NO" if backend is None else _word("dynamo_backend", backend).upper()
    rest = {f"ACCELERATE_{key.upper()}": str(values.get(key, default)) for key, default in DYNAMO_DEFAULTS.items()}
    return {"ACCELERATE_DYNAMO_BACKEND": backend, **rest}
