"""The collectives of a process, counted where they are called, and the storages of tensors. Seen on torch 2.13."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = ("c10d", "_c10d_functional")
# The start of an operator's name decides, so reduce_scatter stands before reduce. Left out: what moves no tensors
# (barrier, wait_tensor), recv (its sender counts), and gather and scatter, whose size only the root sees.
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "send")


@dataclass(frozen=True, slots=True)
class Traffic:
    """The collectives of one kind, in one phase of the step, over groups of one size."""

    phase: str
    kind: str
    """all_gather, reduce_scatter, all_reduce, broadcast, ... : torch's word for it."""
    group_size: int
    count: int
    tensor_bytes: int
    """Bytes of the whole tensors, summed: what an all-gather ends with, what a reduce-scatter starts from."""

    @property
    def sent_bytes(self) -> int:
        """Bytes this process sends when the tensors go around a ring."""
        return ring_bytes(self.kind, self.tensor_bytes, self.group_size)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "sent_bytes": self.sent_bytes}


@dataclass(frozen=True, slots=True)
class UnitTraffic:
    """The collectives of one kind for one FSDP unit in a step; bytes as in `Traffic`."""

    unit: str
    kind: str
    count: int
    tensor_bytes: int


def ring_bytes(kind: str, tensor_bytes: int, group_size: int) -> int:
    """Bytes each of `group_size` processes sends for a collective on a tensor of `tensor_bytes` as a whole.

    (N-1)/N of it to gather or to scatter, twice that to all-reduce (a reduce-scatter, then an all-gather), all of it to
    broadcast or reduce: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations";
    the same factors as the bus bandwidth of NVIDIA's nccl-tests, doc/PERFORMANCE.md. A backend may send otherwise.
    """
    if kind in ("broadcast", "reduce", "send"):
        return tensor_bytes if group_size > 1 else 0
    once = tensor_bytes * (group_size - 1) // group_size
    return 2 * once if kind == "all_reduce" else once


class Collectives(TorchDispatchMode):
    """A context in which every collective is counted, those of C++ included (DDP's reducer).

    Sees calls of the thread that enters it, and of the backward passes started there. Costs time: none should be
    measured inside.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.unit: str | None = None
        """The FSDP unit that communicates now, where somebody says so; see `train.units`."""
        self.storages: set[StorageWeakRef] = set()
        """What collectives read and wrote, without keeping it alive."""
        self._seen: dict[tuple[str, str, int], list[int]] = {}
        self._of_units: dict[tuple[str, str], list[int]] = {}

    @property
    def traffic(self) -> list[Traffic]:
        """In the order of the first of each."""
        return [Traffic(*key, len(sizes), sum(sizes)) for key, sizes in self._seen.items()]

    @property
    def unit_traffic(self) -> list[UnitTraffic]:
        """Of the units that were named, in the order of the first of each."""
        return [UnitTraffic(*key, len(sizes), sum(sizes)) for key, sizes in self._of_units.items()]

    def enter(self, phase: str) -> None:
        self.phase = phase

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # What a DTensor does comes back here as operations on the local tensors.
        if any(issubclass(type_, DTensor) for type_ in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace in _NAMESPACES:
            self._record(func, [*args, *(kwargs or {}).values()], result)
        return result

    def _record(self, func: Any, arguments: list[Any], result: Any) -> None:
        kind = _kind(func._schema.name.partition("::")[2])
        if kind is None:
            return
        operands = [list(tensors_of(operand)) for operand in (*arguments, result)]
        whole = max(sum(tensor.nbytes for tensor in operand) for operand in operands)
        self._seen.setdefault((self.phase, kind, _group_size(arguments)), []).append(whole)
        if self.unit is not None:
            self._of_units.setdefault((self.unit, kind), []).append(whole)
        self.storages |= storages_of(operands)


def _kind(operator: str) -> str | None:
    name = operator.strip("_").replace("allgather", "all_gather").replace("allreduce", "all_reduce")
    name = name.replace("alltoall", "all_to_all").replace("isend", "send")
    return next((kind for kind in _KINDS if name.startswith(kind)), None)


def _group_size(arguments: list[Any]) -> int:
    for argument in reversed(arguments):
        if isinstance(argument, torch.ScriptObject) and str(argument._type()).endswith("c10d.ProcessGroup"):
            return ProcessGroup.unbox(argument).size()
        if isinstance(argument, ProcessGroup):
            return argument.size()
        if isinstance(argument, str):
            name: Any = argument
            return _resolve_process_group(name).size()
    raise AssertionError("a collective without a process group")


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value.to_local() if isinstance(value, DTensor) else value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))


def storages_of(value: Any) -> set[StorageWeakRef]:
    return {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_of(value)}


def bytes_of(storages: Iterable[StorageWeakRef]) -> int:
    """What is still there of them, each as large as it is now."""
    alive = (torch.UntypedStorage._new_with_weak_ptr(storage.cdata) for storage in storages)
    return sum(storage.nbytes() for storage in alive if storage is not None)


def storage_bytes(*values: Any) -> int:
    """Bytes of the storages under all tensors in `values` (tensors, lists, dicts), each counted once."""
    return bytes_of(storages_of(values))
