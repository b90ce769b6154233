"""What one process's file says: the pieces, in the order in which the script made them."""

import dataclasses
import enum
import functools
import json
import math
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from accel_parallel.files import write_atomic
from accel_parallel.substitutions import Substitution

SCHEMA = 1
MOST_LOSSES = 50
"""Scalars passed to `accelerator.backward` that are kept: the first ones."""


class Record:
    """Everything seen so far. `ended` is None until the script has: with None the process was killed."""

    def __init__(self, folder: Path, substitutions: list[Substitution]) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.path = folder / f"rank-{self.rank:02d}.json"
        self.substitutions = substitutions
        self.ended: str | None = None
        self.accelerators: list[dict[str, Any]] = []
        self.models: list[dict[str, Any]] = []
        self.optimizers: list[dict[str, Any]] = []
        self.optimizer_steps = 0
        self.windows: list[dict[str, Any]] = []
        self.no_windows: str | None = None
        self.logged: list[dict[str, Any]] = []
        self.backward: list[float | str] = []
        self.backward_passes = 0
        self.unseen: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def looking(self, at: str) -> Iterator[None]:
        """What goes wrong inside is the observer's own fault, is written down, and stops no script."""
        try:
            yield
        except Exception as error:
            line = f"{at}: {type(error).__name__}: {error}"
            if line not in self.unseen:
                self.unseen.append(line)

    def write(self) -> None:
        """Raises OSError."""
        content = {
            "schema": SCHEMA,
            "rank": self.rank,
            "ended": self.ended,
            "accelerators": self.accelerators,
            "models": self.models,
            "optimizers": self.optimizers,
            "optimizer_steps": self.optimizer_steps,
            "windows": self.windows,
            "no_windows": self.no_windows,
            "logged_losses": self.logged,
            "backward_losses": self.backward,
            "backward_passes": self.backward_passes,
            "unseen": self.unseen,
            "peak_rss_bytes": peak_rss_bytes(),
            "substitutions": [item.to_dict() for item in self.substitutions],
        }
        write_atomic(self.path, json.dumps(content, indent=1))


def peak_rss_bytes() -> int:
    """Most host memory this process ever held. In KiB on Linux, in bytes on macOS (getrusage(2))."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def scalar(value: Any) -> float | None:
    """A number, or a tensor of one that needs no other process to be read; a number that is not finite stays one."""
    if isinstance(value, bool | DTensor):
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach())
    item = getattr(value, "item", None)  # numpy's
    return scalar(item()) if callable(item) and getattr(value, "size", None) == 1 else None


def number(value: float) -> float | str:
    """JSON knows no infinity and no NaN."""
    return value if math.isfinite(value) else str(value)


def readable(value: Any) -> Any:
    """An argument of `Accelerator` for people and for JSON; objects of settings as a dict of what is set in them."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype | torch.device):
        return str(value).removeprefix("torch.")
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): readable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [readable(item) for item in value]
    if isinstance(value, functools.partial):
        return readable(value.func)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value) if field.repr}
        return {"class": type(value).__name__} | {k: readable(v) for k, v in fields.items() if v is not None}
    return getattr(value, "__name__", None) or type(value).__name__
