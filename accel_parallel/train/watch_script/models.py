"""A model before it is prepared, after, and in its first forward pass."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from accel_parallel.asked import Asked
from accel_parallel.train.probe import storage_bytes
from accel_parallel.train.runtime.observe import Original, Step, observe, watch


@dataclass(frozen=True, slots=True)
class Before:
    """A model as the script made it."""

    original: Original
    name: str
    bytes: int
    trainable: int
    """Elements."""

    @classmethod
    def of(cls, model: nn.Module) -> "Before":
        trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        # Not of storages: what is on the meta device has none.
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        return cls(Original.of(model), type(model).__name__, size, trainable)


def describe(
    model: nn.Module, before: Before, accelerator: Accelerator, own_plugin: bool, asked: Asked
) -> dict[str, Any]:
    """A prepared model, which has not run yet. Sizes in elements unless they are called bytes."""
    shard_size = _shard_size(accelerator, asked) if own_plugin else asked.shard_size
    observed = observe(model, before.original, Step(), accelerator.num_processes, shard_size)
    # Version 1 without the original parameters: whether weights are tied inside a flat one does not show.
    flat = any(name.endswith("_flat_param") for name, _ in model.named_parameters())
    return {
        "class": before.name,
        "own_plugin": own_plugin,
        "parallelism": observed.parallelism.value,
        "units": observed.units,
        "class_counts": before.original.class_counts,
        "whole_elements": before.original.num_parameters,
        "whole_bytes": before.bytes,
        "trainable_elements": before.trainable,
        "held_elements": observed.local_elements,
        "held_bytes": storage_bytes(list(model.parameters())),
        "shard_size": shard_size,
        "promised_elements": observed.largest_promised_shard,
        "tied_before": [list(group) for group in before.original.tied],
        "tied_after": None if flat else [list(group) for group in observed.tied],
        "compute_dtypes": None,
        "resharded_after_forward": None,
    }


def watch_first_forward(model: nn.Module, described: dict[str, Any]) -> None:
    """Fill in what the first forward pass of the prepared model shows; costs nothing after it."""
    stack = ExitStack()
    step = stack.enter_context(watch(model))

    def seen(*_: Any) -> None:
        handle.remove()
        stack.close()
        described["compute_dtypes"] = sorted(str(dtype).removeprefix("torch.") for dtype in step.compute_dtypes)
        described["resharded_after_forward"] = step.resharded_after_forward

    handle = model.register_forward_hook(seen)


def _shard_size(accelerator: Accelerator, asked: Asked) -> int:
    """Processes that share one copy under the plugin that the script made; 1 where there is none."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        return 1
    mesh = accelerator.parallelism_config
    if plugin.fsdp_version == 2:
        return accelerator.num_processes // (mesh.dp_replicate_size * mesh.tp_size if mesh else 1)
    strategy = plugin.sharding_strategy or plugin.reshard_after_forward
    if strategy is ShardingStrategy.NO_SHARD:
        return 1
    hybrid = strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
    return asked.local_world_size if hybrid else accelerator.num_processes
