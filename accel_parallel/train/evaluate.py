"""Validation on held-out text."""

import torch
from torch import nn

from accel_parallel.train.data import ValBatches
from accel_parallel.train.runtime import Runtime


@torch.no_grad()
def evaluate(runtime: Runtime, model: nn.Module, batches: ValBatches) -> float:
    """Collective. Mean cross-entropy in nats over the held-out targets of all processes."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=runtime.device)  # sum of losses, targets
    for tokens, labels, num_targets in batches:  # (B, T) each
        loss = model(tokens.to(runtime.device), labels.to(runtime.device))
        # A batch that is all padding has no mean, but its forward pass is a collective all the same.
        if num_targets:
            total += torch.stack([loss.double() * num_targets, torch.full_like(total[1], num_targets)])
    model.train()
    summed = runtime.gather(total).sum(0)
    return float(summed[0] / summed[1])
