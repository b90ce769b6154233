"""The whole specification of a run, and everything that follows from it by arithmetic."""

import math
from collections.abc import Iterator
from typing import Any, Self

from pydantic import Field

from accel_parallel.spec.fields import Destination, Section, descriptions, keys
from accel_parallel.spec.parallelism import Ddp, Distributed, Fsdp
from accel_parallel.spec.sections import Checkpoint, Data, Hardware, Logging, Model, Training

# What decides which numbers a run produces; everything else may change when it is continued.
IDENTITY_SECTIONS = ("model", "data", "training")
IDENTITY_KEYS = ("distributed.mixed_precision",)


class RunSpec(Section):
    """What one run is: frozen, complete, and the only input of everything downstream."""

    distributed: Distributed = Field(default_factory=Distributed)
    ddp: Ddp = Field(default_factory=Ddp)
    fsdp: Fsdp = Field(default_factory=Fsdp)
    model: Model = Field(default_factory=lambda: Model.model_validate({}))
    data: Data = Field(default_factory=Data)
    training: Training = Field(default_factory=Training)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    logging: Logging = Field(default_factory=Logging)
    hardware: Hardware = Field(default_factory=Hardware)

    @property
    def num_processes(self) -> int:
        """Processes over all machines."""
        return self.distributed.num_machines * self.distributed.processes_per_machine

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step over all processes."""
        return self.training.batch_size * self.model.seq_len

    def batch_problem(self) -> str | None:
        """Why the global batch cannot be split evenly, naming the nearest sizes that can; `None` if it can."""
        unit = self.num_processes * self.training.grad_accum_steps
        size = self.training.batch_size
        if size % unit == 0:
            return None
        below, above = size // unit * unit, (size // unit + 1) * unit
        nearest = f"{below} or {above}" if below else f"{above}"
        return (
            f"training.batch_size {size} does not divide by {self.num_processes} processes x "
            f"{self.training.grad_accum_steps} micro-batches = {unit}; nearest that do: {nearest}"
        )

    def with_world(self, num_machines: int, processes_per_machine: int) -> Self:
        """The same specification on another number of processes."""
        distributed = self.distributed.model_copy(
            update={"num_machines": num_machines, "processes_per_machine": processes_per_machine}
        )
        return self.model_copy(update={"distributed": distributed})

    def flat(self) -> dict[str, Any]:
        """Every key as `section.key` with its plain value, in reading order."""
        return {
            f"{section}.{key}": value
            for section, values in self.model_dump(mode="json", by_alias=True).items()
            for key, value in values.items()
        }

    def identity(self) -> dict[str, Any]:
        """The keys that decide which numbers the run produces."""
        return {
            key: value
            for key, value in self.flat().items()
            if key.split(".")[0] in IDENTITY_SECTIONS or key in IDENTITY_KEYS
        }

    def identity_differences(self, other: "RunSpec") -> list[str]:
        """One line for each deciding key whose value differs: `training.lr 0.003 -> 0.001` (this -> other)."""
        ours, theirs = self.identity(), other.identity()
        return [f"{key} {_shown(ours[key])} -> {_shown(theirs[key])}" for key in ours if ours[key] != theirs[key]]


def _shown(value: Any) -> str:
    """As a specification has it."""
    return "null" if value is None else str(value)


def lr_at(step: int, training: Training) -> float:
    """Learning rate of optimizer step `step`, counted from 1.

    Linear from 0 to `lr` over `warmup_steps`, then half a cosine down to `min_lr` at `steps`
    (Loshchilov & Hutter 2017, "SGDR", without restarts).
    """
    if step <= training.warmup_steps:
        return training.lr * step / training.warmup_steps
    span = training.steps - training.warmup_steps
    progress = min(1.0, (step - training.warmup_steps) / span) if span else 1.0
    return training.min_lr + 0.5 * (training.lr - training.min_lr) * (1 + math.cos(math.pi * progress))


def destinations() -> Iterator[tuple[str, Destination, str]]:
    """Every key as `(section.key, where it takes effect, its one-line description)`."""
    for section_name, section_field in RunSpec.model_fields.items():
        section = section_field.annotation
        assert isinstance(section, type) and issubclass(section, Section)
        described = descriptions(section)
        for key, field in keys(section).items():
            extra = field.json_schema_extra
            destination = extra.get("destination", Destination.OURS) if isinstance(extra, dict) else Destination.OURS
            yield f"{section_name}.{key}", Destination(str(destination)), described[key]
