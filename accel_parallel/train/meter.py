"""The numbers of a step, kept on the device until somebody looks: one transfer per report."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from accel_parallel.errors import TrainingError
from accel_parallel.train.runtime import Runtime

_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Reading:
    """What all processes agree on after a report. Rates are since the one before, over all processes."""

    loss: float
    grad_norm: float
    step_seconds: float
    tokens_per_sec: float
    mfu: float | None
    peak_memory_gib: float


class Meter:
    """Collects losses and gradient norms of this process without waiting for the device."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._loss = torch.zeros((), device=runtime.device)
        self._grad_norm = torch.zeros((), device=runtime.device)
        # The first steps at which this process's loss, and the gradient over all processes, were not finite.
        self._bad_loss = torch.full((), _NEVER, dtype=torch.float64, device=runtime.device)
        self._bad_gradient = self._bad_loss.clone()
        self._micro_batches = 0
        self._steps = 0
        self._started = time.perf_counter()
        self._windows: list[tuple[int, float]] = []

    @property
    def mean_tokens_per_sec(self) -> float:
        """Over the whole launch, except the first report's steps, in which caches and threads warm up."""
        windows = self._windows[1:] or self._windows
        seconds = sum(window[1] for window in windows)
        return sum(window[0] for window in windows) * self._runtime.spec.tokens_per_step / seconds if seconds else 0.0

    def add(self, loss: Tensor, step: int) -> None:
        """Take the loss, a scalar, of one micro-batch of optimizer step `step`."""
        loss = loss.detach().float()
        first = self._micro_batches % self._runtime.spec.training.grad_accum_steps == 0
        self._loss = loss if first else self._loss + loss
        self._micro_batches += 1
        self._bad_loss = first_bad(self._bad_loss, loss, step)

    def end_step(self, grad_norm: Tensor, step: int) -> None:
        """Take the gradient norm, a scalar, of optimizer step `step`."""
        self._grad_norm = grad_norm.detach().float()
        self._bad_gradient = first_bad(self._bad_gradient, self._grad_norm, step)
        self._steps += 1

    def read(self) -> Reading:
        """Collective, and the only wait for the device. Numbers of the latest step, averaged over the processes.

        Raises TrainingError on every process when a loss or gradient was not finite on any, with its step and rank.
        """
        spec = self._runtime.spec
        mean_loss = self._loss.double() / spec.training.grad_accum_steps
        mine = torch.stack([mean_loss, self._grad_norm.double(), self._bad_loss, self._bad_gradient])
        rows = self._runtime.gather(mine).tolist()
        steps, seconds = self._steps, time.perf_counter() - self._started
        refuse_bad(rows)
        self._windows.append((steps, seconds))
        self.restart_clock()
        tokens_per_sec = steps * spec.tokens_per_step / seconds
        return Reading(
            loss=sum(row[0] for row in rows) / len(rows),
            grad_norm=rows[0][1],
            step_seconds=seconds / steps,
            tokens_per_sec=tokens_per_sec,
            mfu=self._runtime.mfu(tokens_per_sec),
            peak_memory_gib=peak_memory_gib(self._runtime.device),
        )

    def restart_clock(self) -> None:
        """Do not count what happened since the last report, such as an evaluation, as training time."""
        self._steps = 0
        self._started = time.perf_counter()


def first_bad(bad_step: Tensor, value: Tensor, step: int) -> Tensor:
    """`bad_step`, or `step` if it is earlier and `value` is not finite; without waiting for the device."""
    return torch.where(torch.isfinite(value), bad_step, bad_step.clamp(max=step))


def refuse_bad(rows: list[list[float]]) -> None:
    """Raise TrainingError if the rows of all ranks hold a step at which a loss or the gradient was not finite."""
    loss_step, rank = min((row[2], rank) for rank, row in enumerate(rows))
    gradient_step = min(row[3] for row in rows)
    if loss_step < _NEVER and loss_step <= gradient_step:
        raise TrainingError(f"the loss is not finite at step {int(loss_step)} on rank {rank}", step=int(loss_step))
    if gradient_step < _NEVER:
        step = int(gradient_step)
        raise TrainingError(f"the gradient is not finite at step {step}, with a finite loss on every rank", step=step)


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory of this process so far, in GiB: allocated on an accelerator, resident on CPU."""
    if device.type == "cpu":
        import resource
        import sys

        # Kilobytes on Linux, bytes on macOS (getrusage(2)).
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 2**30
    return torch.accelerator.max_memory_allocated(device) / 2**30
