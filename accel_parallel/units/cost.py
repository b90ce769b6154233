"""What units cost each process: the shard it holds, the bytes it gathers and reduces, what is gathered at once.

Facts: torch 2.13 (distributed/fsdp/_flat_param.py, distributed/fsdp/_fully_shard/). Nothing here is measured; tests
compare with what real processes hold and move.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from accel_parallel.units.tree import Model, Module
from accel_parallel.units.wrap import Unit

BYTES = 4
"""Of a parameter at rest: float32."""
ALIGNMENT = 16
"""Bytes. Version 1 starts each original parameter at a multiple of them in its unit's flat one, as gathered."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How units are spread: `shard_size` processes share one copy, of which there are `replicas`."""

    version: int
    shard_size: int
    replicas: int = 1
    param_bytes: int = BYTES
    """Of a gathered parameter: 2 under mixed precision."""
    reduce_bytes: int = BYTES
    """Of a gradient while it is reduced."""
    aligned: bool = True
    """Version 1 with `fsdp_use_orig_params`."""


def shard_sizes(unit: Unit, sharding: Sharding) -> list[int]:
    """Parameters that each of `shard_size` processes holds of a unit, padding included.

    Version 2 cuts each parameter along its first dimension into as many pieces of equal height as `torch.chunk` makes,
    and version 1 the flat parameter of the unit, aligned and padded, into equal ones.
    """
    size = sharding.shard_size
    if sharding.version == 1:
        return [_flat_size(unit, sharding)] * size
    sizes = [0] * size
    for shape in unit.parameters.values():
        rows, row = shape[0], prod(shape[1:])
        height = -(-rows // size)
        for rank in range(size):
            sizes[rank] += max(0, min(height, rows - rank * height)) * row
    return sizes


def padded_size(unit: Unit, sharding: Sharding) -> int:
    """Parameters of the whole tensor that is gathered or reduced: as many from each process."""
    size = sharding.shard_size
    if sharding.version == 1:
        return _flat_size(unit, sharding) * size
    return sum(-(-shape[0] // size) * size * prod(shape[1:]) for shape in unit.parameters.values())


def traffic(found: Sequence[Unit], sharding: Sharding) -> dict[tuple[str, str], tuple[int, int]]:
    """Collectives of one forward and one backward pass, by phase and kind: how many, and bytes of the whole tensors.

    Every unit is gathered for the forward pass, and again for the backward pass if it reshards; its gradients are
    reduced once. Between replicas the shards are all-reduced. One process that holds all gathers nothing.
    """
    holding = [unit for unit in found if unit.parameters]
    again = [unit for unit in holding if unit.reshards]

    def total(of: Sequence[Unit], number: int) -> tuple[int, int]:
        return len(of), sum(padded_size(unit, sharding) for unit in of) * number

    reduced = total(holding, sharding.reduce_bytes)
    moved = {}
    if sharding.shard_size > 1:
        moved["forward", "all_gather"] = total(holding, sharding.param_bytes)
        moved["backward", "all_gather"] = total(again, sharding.param_bytes)
        moved["backward", "reduce_scatter"] = reduced
    if sharding.replicas > 1:
        moved["backward", "all_reduce"] = (reduced[0], reduced[1] // sharding.shard_size)
    return {key: (count, size) for key, (count, size) in moved.items() if count}


def peaks(model: Model, found: Sequence[Unit], sharding: Sharding) -> dict[str, int]:
    """For each unit, most bytes of gathered parameters that exist at once while it runs; the root's is that of a step.

    Counted: the units that run (one inside another), those that stay gathered, and the next one, which is gathered
    ahead. The order is that in which the modules stand, backwards in the backward pass. Not counted: activations,
    gradients, shards, and the buffer out of which version 2 copies while it gathers.
    """
    size = {unit.name: padded_size(unit, sharding) * sharding.param_bytes for unit in found}
    unit_of = {module: unit for unit in found for module in unit.modules}
    forward = list(_visits(model.root, unit_of))
    backward = [(unit, not entered) for unit, entered in reversed(forward)]
    most, held, running = dict.fromkeys(size, 0), {""}, Counter[str]()
    for visits, frees_all in ((forward, False), (backward, True)):
        left = Counter(unit.name for unit, entered in visits if entered)
        upcoming = [unit.name for unit, entered in visits if entered]
        position = 0
        for unit, entered in visits:
            if not entered:
                running[unit.name] -= 1
                left[unit.name] -= 1
                if not left[unit.name] and unit.name and (frees_all or unit.reshards):
                    held.discard(unit.name)
                continue
            position += 1
            running[unit.name] += 1
            held |= {unit.name, *_next_to_gather(upcoming, position, size)}
            now = sum(size[name] for name in held)
            for name in +running:
                most[name] = max(most[name], now)
    return most


def _next_to_gather(upcoming: Sequence[str], position: int, size: dict[str, int]) -> Iterator[str]:
    """The next unit that has parameters, if there is one."""
    for name in upcoming[position:]:
        if size[name]:
            yield name
            return


def _visits(module: Module, unit_of: dict[str, Unit]) -> Iterator[tuple[Unit, bool]]:
    """Each unit where it begins (true) and where it ends."""
    unit = unit_of.get(module.name)
    if unit is not None:
        yield unit, True
    for child in module.children:
        yield from _visits(child, unit_of)
    if unit is not None:
        yield unit, False


def _flat_size(unit: Unit, sharding: Sharding) -> int:
    """A process's part of the flat parameter of version 1."""
    step = ALIGNMENT // sharding.param_bytes if sharding.aligned else 1
    flat = 0
    for shape in unit.parameters.values():
        flat = -(-flat // step) * step + prod(shape)
    return -(-flat // sharding.shard_size)
