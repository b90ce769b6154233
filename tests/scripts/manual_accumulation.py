"""Accumulates gradients by hand, as scripts did before `accelerator.accumulate`: every micro-batch is reduced."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(8, 32), nn.Linear(32, 2)
        self.blocks = nn.Sequential(Block(32), Block(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.enter(x)))


def main(accumulate: int = 2) -> None:
    accelerator = Accelerator()
    set_seed(0)
    data = torch.randn(96, 8)
    loader = DataLoader(TensorDataset(data, (data.sum(1) > 0).long()), batch_size=4, shuffle=True, num_workers=1)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, (inputs, labels) in enumerate(loader, start=1):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss / accumulate)
        if step % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print("done", loss.item())


if __name__ == "__main__":
    main()
