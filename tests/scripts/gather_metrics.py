"""Accumulates through Accelerate, evaluates with a last batch that is not full, logs through a tracker of its own."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Memory(GeneralTracker):
    """Keeps what it is given."""

    name = "memory"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def tracker(self) -> list[tuple[int | None, dict[str, float]]]:
        return self.rows

    def store_init_configuration(self, values: dict[str, float]) -> None:
        pass

    def log(self, values: dict[str, float], step: int | None = None, **kwargs: object) -> None:
        self.rows.append((step, values))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    tracker = Memory()
    accelerator = Accelerator(gradient_accumulation_steps=2, log_with=tracker)
    accelerator.init_trackers("metrics")
    set_seed(1)
    train, held_out = torch.randn(48, 16), torch.randn(21, 16)
    loader = DataLoader(TensorDataset(train, train.sum(1, keepdim=True)), batch_size=4)
    evaluation = DataLoader(TensorDataset(held_out, held_out.sum(1, keepdim=True)), batch_size=4)
    model = nn.Sequential(Block(), Block(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    model, optimizer, loader, evaluation = accelerator.prepare(model, optimizer, loader, evaluation)
    for epoch in range(arguments.epochs):
        model.train()
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = (model(inputs).mean(1, keepdim=True) - targets).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.log({"train/loss": loss.item(), "epoch": epoch}, step=epoch)
        model.eval()
        errors = []
        for inputs, targets in evaluation:
            with torch.no_grad():
                wrong = (model(inputs).mean(1, keepdim=True) - targets).abs()
            errors.append(accelerator.gather_for_metrics(wrong))
        seen = torch.cat(errors)
        assert len(seen) == len(held_out), len(seen)
        if accelerator.is_main_process:
            tracker.log({"eval_loss": seen.square().mean(), "eval_error": seen.mean()}, step=epoch)
    accelerator.end_training()


if __name__ == "__main__":
    main()
