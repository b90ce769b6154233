"""What a prepared model really is, seen from its own parameters, shards and one discarded step."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from accel_parallel.asked import Parallelism


@dataclass(frozen=True, slots=True)
class Original:
    """The model before it is prepared."""

    num_parameters: int
    parameter_shapes: dict[str, tuple[int, ...]]
    class_counts: dict[str, int]
    tied: tuple[tuple[str, ...], ...]
    embeddings: tuple[str, ...]
    """Names of the modules where tokens come in and go out; of a model of transformers."""

    @classmethod
    def of(cls, model: nn.Module) -> "Original":
        classes: dict[str, int] = {}
        for module in model.modules():
            classes[type(module).__name__] = classes.get(type(module).__name__, 0) + 1
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        ends = set(map(id, _embeddings(model)))
        embeddings = tuple(name for name, module in model.named_modules() if id(module) in ends)
        return cls(sum(p.numel() for p in model.parameters()), shapes, classes, tied_parameters(model), embeddings)


@dataclass(slots=True)
class Step:
    """What one forward and backward pass showed."""

    compute_dtypes: set[torch.dtype] = field(default_factory=set)
    resharded_after_forward: bool | None = None
    """Whether the inner units gave their parameters back before the backward pass; None without inner units."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The prepared model in this process. Sizes are in elements; parameters are float32."""

    parallelism: Parallelism
    world_size: int
    local_elements: int
    largest_promised_shard: int
    units: dict[str, str]
    """Class of each FSDP unit by its module's name; the root's name is empty."""
    compute_dtypes: frozenset[torch.dtype]
    resharded_after_forward: bool | None
    tied: tuple[tuple[str, ...], ...]


def observe(model: nn.Module, original: Original, step: Step, world_size: int, shard_size: int) -> Observed:
    """Look at a prepared model; `shard_size` is only used to say how large a shard was promised to be."""
    units = {clean_name(name): _class_name(module) for name, module in model.named_modules() if _is_unit(module)}
    parallelism = parallelism_of(model)
    return Observed(
        parallelism=parallelism,
        world_size=world_size,
        local_elements=sum(local(parameter).numel() for parameter in _unique_parameters(model)),
        largest_promised_shard=_largest_shard(model, original, parallelism, shard_size),
        units=units,
        compute_dtypes=frozenset(step.compute_dtypes),
        resharded_after_forward=step.resharded_after_forward,
        tied=tied_parameters(model),
    )


def parallelism_of(model: nn.Module) -> Parallelism:
    """How this module tree is really parallelised, from the classes of its modules."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return Parallelism.FSDP1
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return Parallelism.FSDP2
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return Parallelism.DDP
    return Parallelism.SINGLE


@contextmanager
def watch(model: nn.Module) -> Iterator[Step]:
    """Record, while a forward pass runs inside, the precision of matrix products and when units reshard."""
    step = Step()
    handles = []

    def record_dtype(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        step.compute_dtypes.add(output.dtype)

    # Version 2 never gives back a final norm, or a head and what is tied to it, that Accelerate made a unit: their
    # backward pass comes first anyway (fsdp2_prepare_model, accelerate/utils/fsdp_utils.py, 1.15).
    kept = {id(model), *map(id, _embeddings(model))}
    inner_units = [m for m in model.modules() if _is_unit(m) and id(m) not in kept and "Norm" not in _class_name(m)]

    def record_reshard(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if inner_units:
            step.resharded_after_forward = all(_is_sharded_now(unit) for unit in inner_units)

    for module in model.modules():
        if _class_name(module) == "Linear":
            handles.append(module.register_forward_hook(record_dtype))
    # Before any hook of the wrapper gets to run for the backward pass.
    handles.append(model.register_forward_hook(record_reshard))
    try:
        yield step
    finally:
        for handle in handles:
            handle.remove()


def clean_name(name: str) -> str:
    """A module or parameter name without what wrappers put into it; the root is the empty string."""
    parts = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
    kept = [part for part in name.split(".") if part not in parts]
    return ".".join(kept).removeprefix("module.")


def tied_parameters(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of names that are one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(clean_name(name))
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def _unique_parameters(model: nn.Module) -> list[Tensor]:
    flat = [m._flat_param for m in model.modules() if isinstance(m, FullyShardedDataParallel) and m._has_params]
    return [parameter for parameter in flat if parameter is not None] or list(model.parameters())


def local(parameter: Tensor) -> Tensor:
    """What this process holds of it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _class_name(module: nn.Module) -> str:
    """The class before wrapping: version 1 holds the module inside, version 2 puts FSDP before the class's name."""
    inner = module.module if isinstance(module, FullyShardedDataParallel) else module
    return type(inner).__name__.removeprefix("FSDP")


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, FullyShardedDataParallel | FSDPModule)


def _embeddings(model: nn.Module) -> list[nn.Module]:
    """Of a model of transformers: where tokens come in, and where they go out."""
    found = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        with suppress(NotImplementedError):
            found.append(getattr(model, name, lambda: None)())
    return [module for module in found if module is not None]


def _is_sharded_now(unit: nn.Module) -> bool:
    if isinstance(unit, FullyShardedDataParallel):
        # After the forward pass the flat parameter shows its shard either way; what tells is whether the memory of
        # the gathered one was given back.
        full = getattr(unit._flat_param, "_full_param_padded", None)
        return full is None or full.untyped_storage().size() == 0
    return all(isinstance(parameter, DTensor) for parameter in unit.parameters())


def _largest_shard(model: nn.Module, original: Original, parallelism: Parallelism, shard_size: int) -> int:
    """Elements the first rank may hold: version 2 splits rows of each parameter, version 1 a padded flat unit."""
    if parallelism is Parallelism.FSDP1:
        units = [m for m in model.modules() if isinstance(m, FullyShardedDataParallel) and m._has_params]
        # With original parameters kept, version 1 starts each on a 16-byte boundary: up to 3 float32 of padding.
        padding = 3 * len(original.parameter_shapes) + len(units) * shard_size
        return -(-original.num_parameters // shard_size) + padding
    # A parameter without dimensions is not split.
    return sum(-(-(shape or (1,))[0] // shard_size) * _row(shape) for shape in original.parameter_shapes.values())


def _row(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape[1:]:
        size *= extent
    return size
