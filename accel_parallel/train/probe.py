"""What one training step of a prepared model costs a process: collectives, bytes at rest, peak of allocated bytes.

Knows neither how the model is spread over the processes nor how the step is made. Bytes are those of storages, padding
included; nothing is estimated. Seen on torch 2.13, gloo, CPU.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

Phase = Callable[[str], None]
"""Called with a name, says that everything from here on belongs to that part of the step."""
TrainingStep = Callable[[Phase], None]
"""Forward pass, backward pass and optimizer step; leaves the gradients where they are."""

_STEP = "accel_parallel.probe.step"
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
        self.storages: set[StorageWeakRef] = set()
        """What collectives read and wrote, without keeping it alive."""
        self._seen: dict[tuple[str, str, int], list[int]] = {}

    @property
    def traffic(self) -> list[Traffic]:
        """In the order of the first of each."""
        return [Traffic(*key, len(sizes), sum(sizes)) for key, sizes in self._seen.items()]

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
        self.storages |= storages_of(operands)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one process. A storage counts once, however many tensors show it."""

    parameters: int
    gradients: int
    """After the optimizer step, before they are cleared."""
    optimizer_state: int
    between_steps: int
    """Parameters, optimizer state, and whatever of gradients and of collectives' tensors survives the clearing."""
    peak: int
    """Most bytes allocated at one moment of a step."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step, as one process sees it."""

    traffic: list[Traffic]
    memory: Memory

    def to_dict(self) -> dict[str, Any]:
        return {"traffic": [item.to_dict() for item in self.traffic], "memory": asdict(self.memory)}


def observe_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: TrainingStep, *, peak_of: int = 3
) -> StepCost:
    """Collective. Take two steps to settle, one to count collectives and bytes, and the peak of `peak_of` more.

    DDP rearranges its buckets after its first backward pass and tells the others while it does the second.
    """
    for _ in range(2):
        step(ignore_phase)
        optimizer.zero_grad()
    cost, _ = observe_collectives(model, optimizer, step)
    peak = peak_allocated(lambda: step(ignore_phase), optimizer.zero_grad, times=peak_of)
    return replace(cost, memory=replace(cost.memory, peak=cost.memory.between_steps + peak))


def observe_collectives(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: TrainingStep
) -> tuple[StepCost, set[StorageWeakRef]]:
    """Collective. Take one step; what it costs, with a peak of nothing but the storages that rest between two steps.

    These storages come second.
    """
    collectives = Collectives()
    with collectives:
        step(collectives.enter)
    parameters = storages_of(list(model.parameters()))
    gradients = storages_of([parameter.grad for parameter in model.parameters()])
    state = storages_of(list(optimizer.state.values()))
    gradient_bytes = _bytes(gradients)
    optimizer.zero_grad()
    resting = parameters | gradients | state | collectives.storages
    memory = Memory(
        parameters=_bytes(parameters),
        gradients=gradient_bytes,
        optimizer_state=_bytes(state),
        between_steps=_bytes(resting),
        peak=_bytes(resting),
    )
    return StepCost(collectives.traffic, memory), resting


def peak_allocated(step: Callable[[], None], after: Callable[[], None], *, times: int) -> int:
    """Bytes of CPU memory that `step` holds at its most greedy moment, beyond what is there when it begins.

    The least of several steps in a row, each followed by `after`: torch's profiler does not see what is freed on gloo's
    threads (torch 2.13), so a step may look greedier than it is. One more step goes before them, because it does not
    see either how that one frees what is older than the profile (version 1 of FSDP: the gradients).
    """
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile:
        for _ in range(times + 1):
            with torch.autograd.profiler.record_function(_STEP):
                step()
            after()
    assert profile.kineto_results is not None
    held, at_start, peaks = 0, 0, [0]
    for event in sorted(profile.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == _STEP:
            at_start = held
            peaks.append(0)
        elif event.name() == "[memory]" and event.device_type().name == "CPU":
            held += event.nbytes()
            peaks[-1] = max(peaks[-1], held - at_start)
    return min(peaks[2:])


def ignore_phase(phase: str) -> None:
    return None


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


def _bytes(storages: Iterable[StorageWeakRef]) -> int:
    """What is still there of them, each as large as it is now."""
    alive = (torch.UntypedStorage._new_with_weak_ptr(storage.cdata) for storage in storages)
    return sum(storage.nbytes() for storage in alive if storage is not None)
