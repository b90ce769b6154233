"""The thresholds of `min_num_params` at which a plan changes, and which of them torch does not take."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from accel_parallel.explain.plan import Plan
from accel_parallel.units import Unit, bands, refused, sharded_twice, split_parameters, units


@dataclass(frozen=True, slots=True)
class Step:
    """Values of `min_num_params` from `first` to `last` (without end: None), and the units that all of them make."""

    first: int
    last: int | None
    classes: Mapping[str, int]
    """Units below the root that hold parameters, by class."""
    current: bool
    fails: str | None = None
    """Why torch does not take it."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def size_steps(made: Plan) -> list[Step]:
    """Under SIZE_BASED_WRAP: every threshold from 1 on."""
    steps = []
    for band in bands(made.model, made.wrapping):
        at = replace(made, wrapping=replace(made.wrapping, policy="SIZE_BASED_WRAP", min_num_params=band.first))
        lists = refused(made.model, at.wrapping)
        split = split_parameters(made.model, band.units)
        twice = sharded_twice(made.model, at.wrapping)
        fails = f"{lists[0].class_name} refused" if lists else f"{twice[0][0]} sharded twice" if twice else None
        fails = fails or ("tied weights in two units" if split else None)
        current = band.first <= made.wrapping.min_num_params <= (band.last or made.wrapping.min_num_params)
        steps.append(Step(band.first, band.last, _classes(band.units), current, fails))
    return steps


def block_steps(made: Plan, block_parameters: int, threshold: int) -> list[Step]:
    """Under `wrap: block` of the specification: blocks are units up to the size of one."""
    plans = [
        units(made.model, replace(made.wrapping, policy=policy, classes=("TransformerBlock",)))
        for policy in ("TRANSFORMER_BASED_WRAP", "NO_WRAP")
    ]
    blocks, none = map(_classes, plans)
    reached = threshold <= block_parameters
    return [Step(1, block_parameters, blocks, reached), Step(block_parameters + 1, None, none, not reached)]


def _classes(found: Sequence[Unit]) -> dict[str, int]:
    return dict(Counter(unit.class_name for unit in found if unit.name and unit.parameters))
