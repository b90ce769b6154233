"""What may change when a run goes on from a checkpoint, and what that does."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from accel_parallel.spec import RunSpec


class Effect(StrEnum):
    """What another value of a key does to a run that goes on."""

    WEIGHTS = "the weights would not fit, or mean something else"
    ORDER = "samples would be repeated or left out"
    TOKENS = "goes on if the tokens are the same, which is seen when it starts"
    NUMBERS = "goes on with the new value"
    LAYOUT = "the same numbers, spread or computed differently"
    NONE = "of no consequence to the numbers"

    @property
    def refused(self) -> bool:
        return self in (Effect.WEIGHTS, Effect.ORDER)


# The first that fits: a key, or a whole section.
_EFFECTS: Mapping[str, Effect] = {
    "model.preset": Effect.NONE,
    "model.activation_checkpointing": Effect.LAYOUT,
    "model.loss": Effect.LAYOUT,
    # The checkpoint's weights are the ones that count.
    "model.init_from": Effect.NONE,
    # A sample is so many tokens, and the cursor of the data counts samples.
    "model.seq_len": Effect.ORDER,
    "training.seed": Effect.ORDER,
    "training.grad_accum_steps": Effect.LAYOUT,
    "training.deterministic": Effect.LAYOUT,
    "distributed.mixed_precision": Effect.NUMBERS,
    "distributed.num_machines": Effect.LAYOUT,
    "distributed.processes_per_machine": Effect.LAYOUT,
    "model": Effect.WEIGHTS,
    "data": Effect.TOKENS,
    "training": Effect.NUMBERS,
    "fsdp": Effect.LAYOUT,
}


@dataclass(frozen=True, slots=True)
class Change:
    """One key of the specification with another value than before."""

    key: str
    before: Any
    now: Any
    effect: Effect

    def __str__(self) -> str:
        return f"{self.key} {self.before} -> {self.now}"


def effect_of(key: str) -> Effect:
    """What another value of `section.key` does."""
    return _EFFECTS.get(key) or _EFFECTS.get(key.partition(".")[0], Effect.NONE)


def changes(before: Mapping[str, Any], now: RunSpec) -> list[Change]:
    """Every key that differs, in reading order; `before` is flat and may be of another version with other keys."""
    flat = now.flat()
    differing = (key for key in flat if key in before and before[key] != flat[key])
    return [Change(key, before[key], flat[key], effect_of(key)) for key in differing]
