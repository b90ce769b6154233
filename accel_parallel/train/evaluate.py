"""Validation on held-out text."""

import math

import torch
from torch import nn

from accel_parallel.errors import TrainingError
from accel_parallel.train.data import ValBatches
from accel_parallel.train.runtime import Runtime


@torch.no_grad()
def evaluate(runtime: Runtime, model: nn.Module, batches: ValBatches) -> float:
    """Collective. Mean cross-entropy in nats over the held-out targets of all processes.

    Raises TrainingError on every process if it is not finite.
    """
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=runtime.device)  # sum of losses, targets
    for tokens, labels, num_targets in batches:  # (B, T) each
        loss = model(*runtime.to_device(tokens, labels))
        # A batch that is all padding has no mean, but its forward pass is a collective all the same.
        if num_targets:
            total += torch.stack([loss.double() * num_targets, torch.full_like(total[1], num_targets)])
    model.train()
    summed = runtime.gather(total).sum(0)
    loss = float(summed[0] / summed[1])
    if not math.isfinite(loss):
        raise TrainingError("the validation loss is not finite")
    return loss
