"""The optimizer and its learning rate."""

import torch
from torch import nn

from accel_parallel.spec import Training, lr_at


def build_optimizer(model: nn.Module, training: Training) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=training.lr, betas=training.betas)


def set_lr(optimizer: torch.optim.Optimizer, step: int, training: Training) -> float:
    """Give every group the learning rate of optimizer step `step`, counted from 1, and return it."""
    lr = lr_at(step, training)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr
