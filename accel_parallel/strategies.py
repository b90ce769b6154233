"""The catalogue of strategies: each is a name and what it changes in the specification, one row each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from accel_parallel.errors import LaunchError
from accel_parallel.spec import RunSpec, override_spec
from accel_parallel.suggest import did_you_mean


class Kind(StrEnum):
    """What holds the model in a process."""

    NO = "no"
    """Nothing: one process, one device."""
    DDP = "ddp"
    """A whole replica in each process."""
    FSDP = "fsdp"
    """A shard in each process."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """One row. `overrides` are dotted keys of the specification that this name decides."""

    name: str
    kind: Kind
    summary: str
    overrides: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def apply(self, spec: RunSpec) -> RunSpec:
        """`spec` with this strategy's overrides.

        Raises SpecError when the two contradict each other.
        """
        return override_spec(spec, self.overrides, f"strategy {self.name}") if self.overrides else spec


ONE_PROCESS = MappingProxyType({"distributed.num_machines": 1, "distributed.processes_per_machine": 1})

CATALOGUE = (
    Strategy("single", Kind.NO, "one process on one device", ONE_PROCESS),
    Strategy("ddp", Kind.DDP, "a replica in each process, gradients averaged"),
    Strategy("fsdp", Kind.FSDP, "a shard in each process, as the fsdp section says"),
)  # fmt: skip

STRATEGIES: Mapping[str, Strategy] = MappingProxyType({strategy.name: strategy for strategy in CATALOGUE})


def find_strategy(name: str) -> Strategy:
    """The catalogue's row of that name.

    Raises LaunchError naming the closest one and all of them.
    """
    if name not in STRATEGIES:
        raise LaunchError(
            f"unknown strategy {name!r}{did_you_mean(name, STRATEGIES)}", hint=f"known: {', '.join(STRATEGIES)}"
        )
    return STRATEGIES[name]
