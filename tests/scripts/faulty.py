"""A small training that goes wrong in the way that is asked for."""

import os
import random
import sys
import time

import torch
from accelerate import Accelerator
from torch import nn


def main(fault: str) -> None:
    accelerator = Accelerator()
    rank, sharded = accelerator.process_index, "ACCELERATE_USE_FSDP" in os.environ
    torch.manual_seed(random.randrange(2**32) if fault == "unseeded" else 7)
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8))
    if fault == "bfloat16":
        model.bfloat16()
    other = fault == "other_rate" and sharded
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2 if other else 1e-1)
    if fault == "unprepared":
        return
    model_type = next(model.parameters()).dtype
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(5):
        if step == 2 and rank == 0 and fault == "sleeps":
            time.sleep(1000)
        if step == 2 and rank == 1:
            if fault == "sleeps":
                raise ValueError("the other one sleeps")
            if fault == "raises":
                raise ValueError("a number that is none")
            if fault == "dies":
                os._exit(9)
            if fault == "exits":
                sys.exit(3)
        with accelerator.no_sync(model) if fault == "unreduced" else accelerator.accumulate(model):
            accelerator.backward(model((torch.ones(2, 8) * (rank + 1)).to(model_type)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1])
