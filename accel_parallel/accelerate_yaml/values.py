"""Values of an accelerate file on which Accelerate's plugin fails, in every worker and with a traceback.

accelerate/utils/dataclasses.py, FullyShardedDataParallelPlugin (1.15).
"""

from accel_parallel.accelerate_yaml.render import Config
from accel_parallel.errors import LaunchError
from accel_parallel.suggest import did_you_mean

# The classes of `TransformerLM` that may be wrapped; a test compares.
MODEL_CLASSES = ("TransformerBlock", "Attention", "FeedForward", "LMHead", "Linear", "RMSNorm", "Embedding")
_WORDS = {
    "fsdp_version": ("1", "2"),
    "fsdp_sharding_strategy": (
        "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "1", "2", "3", "4", "5",
    ),
    "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    "fsdp_backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
    "fsdp_state_dict_type": ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
}  # fmt: skip
_TRUTHS = ("fsdp_offload_params", "fsdp_forward_prefetch", "fsdp_use_orig_params", "fsdp_cpu_ram_efficient_loading",
           "fsdp_sync_module_states", "fsdp_activation_checkpointing")  # fmt: skip
_TRUE_OR_FALSE = ("true", "false", "yes", "no", "on", "off", "1", "0", "y", "n", "t", "f")


def check_values(values: Config) -> None:
    """Raises LaunchError naming the first key of fsdp_config (prefixes added) whose value cannot be meant."""
    for key, known in _WORDS.items():
        # Version 1 does not read the one, version 2 not the other; what is not read is the runtime's to compare.
        if values.get(key) is not None and str(values[key]).upper() not in known:
            shown = ", ".join(word for word in known if not word.isdigit() or key == "fsdp_version")
            raise LaunchError(
                f"{key} is {values[key]!r}, and should be one of {shown}{did_you_mean(values[key], known)}"
            )
    for key in _TRUTHS:
        if key in values and str(values[key]).lower() not in _TRUE_OR_FALSE:
            raise LaunchError(f"{key} is {values[key]!r}, and should be true or false")
    threshold = values.get("fsdp_min_num_params")
    if threshold is not None and not str(threshold).replace("_", "").isdecimal():
        raise LaunchError(f"fsdp_min_num_params is {threshold!r}, and should be a whole number such as 1000000")


def check_classes(values: Config) -> None:
    """Raises LaunchError when fsdp_config wraps a class that `TransformerLM` does not have."""
    named = values.get("fsdp_transformer_layer_cls_to_wrap")
    policy = str(values.get("fsdp_auto_wrap_policy")).upper()
    if policy != "TRANSFORMER_BASED_WRAP" or not isinstance(named, str):
        return
    for name in named.split(","):
        if name not in MODEL_CLASSES:
            message = f"fsdp_transformer_layer_cls_to_wrap names {name!r}, which TransformerLM does not have"
            raise LaunchError(message, hint="its blocks are TransformerBlock; a script of yours may stand after --")
