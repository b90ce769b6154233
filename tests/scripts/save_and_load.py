"""Saves its state half-way, trains on, loads, trains on again, and has to learn the same a second time."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.layer(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder
    accelerator = Accelerator(project_config=ProjectConfiguration(str(folder)))
    set_seed(3)
    model = nn.Sequential(nn.Linear(4, 32), Block(), Block(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    batches = torch.randn(5, 8, 4)[:, accelerator.process_index :: 2]

    def train(numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            loss = (model(batches[number]) - batches[number]).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    train(range(2))
    accelerator.save_state(str(folder / "half"))
    first = train(range(2, 5))
    accelerator.load_state(str(folder / "half"))
    again = train(range(2, 5))
    assert again == first, (again, first)


if __name__ == "__main__":
    main()
