"""A model before it is prepared, after, and in its first forward pass."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from accel_parallel.asked import Asked, Parallelism
from accel_parallel.train.probe import storage_bytes
from accel_parallel.train.runtime.check import mismatches
from accel_parallel.train.runtime.observe import Observed, Original, Step, observe, watch
from accel_parallel.train.watch_script.record import Record


@dataclass(frozen=True, slots=True)
class Before:
    """A model as the script made it."""

    original: Original
    name: str
    bytes: int
    trainable: int
    """Elements."""
    dtypes: tuple[str, ...]
    """Of its parameters."""

    @classmethod
    def of(cls, model: nn.Module) -> "Before":
        trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        # Not of storages: what is on the meta device has none.
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
        return cls(Original.of(model), type(model).__name__, size, trainable, tuple(dtypes))


def watch_model(
    model: nn.Module, before: Before, accelerator: Accelerator, own_plugin: bool, asked: Asked, record: Record
) -> dict[str, Any]:
    """A prepared model, which has not run yet. Sizes in elements unless they are called bytes.

    What its first forward pass shows is filled in when that comes; it costs nothing afterwards. `mismatches` are
    against what the launch asked for, or the plugin that the script made itself.
    """
    asked = _of_plugin(accelerator, asked) if own_plugin else asked
    observed = observe(model, before.original, Step(), accelerator.num_processes, asked.shard_size)
    # Version 1 without the original parameters: whether weights are tied inside a flat one does not show.
    flat = any(name.endswith("_flat_param") for name, _ in model.named_parameters())
    if flat:
        observed = replace(observed, tied=before.original.tied)
    # A model that the script makes in another type computes in that.
    precision = accelerator.mixed_precision if before.dtypes == ("float32",) else "its own"

    def differences(observed: Observed) -> list[str]:
        # Accelerate shards nothing of a model that is not trained.
        return mismatches(asked, observed, before.original, precision) if before.trainable else []

    described = {
        "class": before.name,
        "dtypes": list(before.dtypes),
        "own_plugin": own_plugin,
        "parallelism": observed.parallelism.value,
        "units": observed.units,
        "class_counts": before.original.class_counts,
        "whole_elements": before.original.num_parameters,
        "whole_bytes": before.bytes,
        "trainable_elements": before.trainable,
        "held_elements": observed.local_elements,
        "held_bytes": storage_bytes(list(model.parameters())),
        "shard_size": asked.shard_size,
        "promised_elements": observed.largest_promised_shard,
        "tied_before": [list(group) for group in before.original.tied],
        "tied_after": None if flat else [list(group) for group in observed.tied],
        "compute_dtypes": None,
        "resharded_after_forward": None,
        "mismatches": differences(observed),
    }
    stack = ExitStack()
    step = stack.enter_context(watch(model))

    def seen(*_: Any) -> None:
        handle.remove()
        stack.close()
        dtypes, resharded = frozenset(step.compute_dtypes), step.resharded_after_forward
        described["compute_dtypes"] = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
        described["resharded_after_forward"] = resharded
        with record.looking("the first forward pass"):
            shown = replace(observed, compute_dtypes=dtypes, resharded_after_forward=resharded)
            described["mismatches"] = differences(shown)

    handle = model.register_forward_hook(seen)
    return described


def _of_plugin(accelerator: Accelerator, asked: Asked) -> Asked:
    """What the plugin asks for that the script made; how it wraps is the script's own affair."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        return asked
    shard_size = _shard_size(accelerator, asked, plugin)
    version = Parallelism.FSDP2 if plugin.fsdp_version == 2 else Parallelism.FSDP1
    strategy = "its plugin's sharding"
    return replace(asked, parallelism=version, shard_size=shard_size, sharding_strategy=strategy, wrap_policy="")


def _shard_size(accelerator: Accelerator, asked: Asked, plugin: Any) -> int:
    """Processes that share one copy."""
    mesh = accelerator.parallelism_config
    if plugin.fsdp_version == 2:
        return accelerator.num_processes // (mesh.dp_replicate_size * mesh.tp_size if mesh else 1)
    strategy = plugin.sharding_strategy or plugin.reshard_after_forward
    if strategy is ShardingStrategy.NO_SHARD:
        return 1
    hybrid = strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
    return asked.local_world_size if hybrid else accelerator.num_processes
