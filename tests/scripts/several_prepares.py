"""Two models that learn from each other, a frozen one, loaders and a schedule: each prepared in a call of its own."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x))


def main() -> None:
    accelerator = Accelerator()
    set_seed(2)
    generator = nn.Sequential(Block(32), Block(32), nn.Linear(32, 16))
    critic = nn.Sequential(nn.Linear(16, 64), Block(64), nn.Linear(64, 2))
    teacher = nn.Sequential(nn.Linear(16, 2)).requires_grad_(False)
    learn = torch.optim.AdamW(generator.parameters(), lr=1e-3)
    criticise = torch.optim.SGD(critic.parameters(), lr=1e-2)
    generator, learn = accelerator.prepare(generator, learn)
    critic, criticise = accelerator.prepare(critic, criticise)
    teacher = accelerator.prepare_model(teacher, evaluation_mode=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.randn(40, 32)), batch_size=4))
    schedule = accelerator.prepare(torch.optim.lr_scheduler.LinearLR(learn, total_iters=100))
    for (noise,) in loader:
        made = generator(noise).detach()
        accelerator.backward((critic(made) - teacher(made)).square().mean())
        criticise.step()
        criticise.zero_grad()
        loss = critic(generator(noise)).mean()
        accelerator.backward(loss)
        learn.step()
        schedule.step()
        learn.zero_grad()
        criticise.zero_grad()
        accelerator.log({"loss": accelerator.reduce(loss.detach(), "mean").item()})


if __name__ == "__main__":
    main()
