"""A training step to look at, one part after the other."""

from torch import Tensor, nn
from torch.optim import Optimizer

from accel_parallel.train.probe import Phase, TrainingStep
from accel_parallel.train.runtime import Runtime


def training_step(runtime: Runtime, model: nn.Module, optimizer: Optimizer, *batch: Tensor) -> TrainingStep:
    """The step of a prepared model on one micro-batch, tokens and labels, (B, T) each: the one that synchronizes.

    With gradient accumulation there are more of them; the loop has its own way to tell which one is the last.
    """

    def step(phase: Phase) -> None:
        phase("forward")
        loss = model(*batch)
        phase("backward")
        runtime.accelerator.backward(loss)
        phase("clip")
        runtime.clip(model)
        phase("optimizer")
        optimizer.step()

    return step
