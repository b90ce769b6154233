"""One step of a prepared model: its collectives, its bytes at rest, its peak of allocated bytes."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from accel_parallel.train.probe.collectives import Collectives, Traffic, UnitTraffic, bytes_of, storages_of

Phase = Callable[[str], None]
"""Called with a name, says that everything from here on belongs to that part of the step."""
TrainingStep = Callable[[Phase], None]
"""Forward pass, backward pass and optimizer step; leaves the gradients where they are."""

_STEP = "accel_parallel.probe.step"
Naming = Callable[[Collectives], AbstractContextManager[None]]
"""A context in which the counter is told for which unit each collective is."""


def ignore_phase(phase: str) -> None:
    return None


def _unnamed(collectives: Collectives) -> AbstractContextManager[None]:
    return nullcontext()


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
    units: list[UnitTraffic]
    memory: Memory

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "traffic": [item.to_dict() for item in self.traffic]}


def observe_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: TrainingStep,
    *,
    peak_of: int = 3,
    naming: Naming = _unnamed,
) -> StepCost:
    """Collective. Take two steps to settle, one to count collectives and bytes, and the peak of `peak_of` more.

    DDP rearranges its buckets after its first backward pass and tells the others while it does the second. `naming`
    may tell the counter for which unit each collective is.
    """
    for _ in range(2):
        step(ignore_phase)
        optimizer.zero_grad()
    cost, _ = observe_collectives(model, optimizer, step, naming=naming)
    peak = peak_allocated(lambda: step(ignore_phase), optimizer.zero_grad, times=peak_of)
    return replace(cost, memory=replace(cost.memory, peak=cost.memory.between_steps + peak))


def observe_collectives(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: TrainingStep, *, naming: Naming = _unnamed
) -> tuple[StepCost, set[StorageWeakRef]]:
    """Collective. Take one step: what it costs, and the storages that rest between two steps, its peak here."""
    collectives = Collectives()
    with naming(collectives), collectives:
        step(collectives.enter)
    parameters = storages_of(list(model.parameters()))
    gradients = storages_of([parameter.grad for parameter in model.parameters()])
    state = storages_of(list(optimizer.state.values()))
    gradient_bytes = bytes_of(gradients)
    optimizer.zero_grad()
    resting = parameters | gradients | state | collectives.storages
    memory = Memory(
        parameters=bytes_of(parameters),
        gradients=gradient_bytes,
        optimizer_state=bytes_of(state),
        between_steps=bytes_of(resting),
        peak=bytes_of(resting),
    )
    return StepCost(collectives.traffic, collectives.unit_traffic, memory), resting


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
