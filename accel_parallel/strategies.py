"""The catalogue of strategies: each is a name and what it changes in the specification, one row each."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from accel_parallel.errors import LaunchError, Problem, SpecError
from accel_parallel.spec import Draft, RunSpec, parse_set
from accel_parallel.spec.dump import scalar
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
    """One row. `overrides` are dotted keys of the specification that this name decides.

    A specification with fewer processes than `min_processes`, or fewer machines than `min_machines`, is brought up to
    them: a strategy that cannot exist on fewer is shown on the fewest.
    """

    name: str
    kind: Kind
    summary: str
    overrides: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    min_processes: int = 1
    min_machines: int = 1

    @property
    def pins_fsdp(self) -> bool:
        """Whether the name decides keys of the fsdp section, instead of taking them as they are."""
        return self.kind is Kind.FSDP and bool(self.overrides)

    def resolve(self, draft: Draft) -> RunSpec:
        """The draft's specification under this strategy; what the name decides wins over the file and `--set`.

        Raises SpecError when they contradict each other.
        """
        spec = draft.resolve(self.overrides, f"strategy {self.name}")
        return spec.with_world(*self._world(spec))

    def raised(self, draft: Draft) -> str | None:
        """One line when `resolve` has to ask for more processes than the draft does."""
        asked = draft.resolve(self.overrides, f"strategy {self.name}").distributed
        machines, processes = self._world(self.resolve(draft))
        if (machines, processes) == (asked.num_machines, asked.processes_per_machine):
            return None
        was = f"{asked.num_machines} x {asked.processes_per_machine}"
        return f"{self.name} needs more than {was} processes (machines x processes on each): {machines} x {processes}"

    def refuse_contradictions(self, sets: Iterable[str]) -> None:
        """Raises SpecError when an override of the command line wants something else than this name means."""
        wanted = {key: value for key, value, problem in map(parse_set, sets) if problem is None}
        problems = [
            Problem(
                f"{self.name} means {key}={scalar(self.overrides[key])}",
                code="strategy-contradiction",
                path=f"--set {key}={scalar(value)}",
                hint="choose another strategy; `fsdp` takes every key of the fsdp section as it is",
            )
            for key, value in wanted.items()
            if key in self.overrides and self.overrides[key] != value
        ]
        if problems:
            raise SpecError(problems)

    def without_effect(self, sets: Iterable[str]) -> list[str]:
        """One line for each override of the command line that belongs to another kind of strategy."""
        keys = [key for key, _, problem in map(parse_set, sets) if problem is None]
        others = {"ddp", "fsdp"} - {str(self.kind)}
        return [f"--set {key} has no effect under {self.name}" for key in keys if key.partition(".")[0] in others]

    def _world(self, spec: RunSpec) -> tuple[int, int]:
        """Machines, and processes on each."""
        machines = max(spec.distributed.num_machines, self.min_machines)
        return machines, max(spec.distributed.processes_per_machine, -(-self.min_processes // machines))


ONE_PROCESS = MappingProxyType({"distributed.num_machines": 1, "distributed.processes_per_machine": 1})


def _fsdp(version: int, sharding: str, *, offload: bool = False) -> Mapping[str, Any]:
    """All keys that decide what the name says, so that no fsdp section can make it a lie."""
    hybrid2 = version == 2 and sharding == "HYBRID_SHARD"
    return MappingProxyType(
        {
            "fsdp.version": version,
            "fsdp.sharding_strategy": sharding,
            "fsdp.cpu_offload": offload,
            **({} if hybrid2 else {"fsdp.dp_replicate": None}),
        }
    )


CATALOGUE = (
    Strategy("single", Kind.NO, "one process on one device", ONE_PROCESS),
    Strategy("ddp", Kind.DDP, "a replica in each process, gradients averaged"),
    Strategy("fsdp", Kind.FSDP, "a shard in each process, as the fsdp section says"),
    Strategy(
        "fsdp_shard_grad_op", Kind.FSDP, "sharded, gathered from forward to backward pass", _fsdp(2, "SHARD_GRAD_OP")
    ),
    Strategy("fsdp_hybrid_shard", Kind.FSDP, "replicas of a sharded model", _fsdp(2, "HYBRID_SHARD"), min_processes=4),
    Strategy(
        "fsdp_cpu_offload", Kind.FSDP, "sharded, shards rest in host memory", _fsdp(2, "FULL_SHARD", offload=True)
    ),
    Strategy("fsdp1_full_shard", Kind.FSDP, "a shard in each process, version 1", _fsdp(1, "FULL_SHARD")),
    Strategy(
        "fsdp1_shard_grad_op",
        Kind.FSDP,
        "sharded, gathered from forward to backward pass, version 1",
        _fsdp(1, "SHARD_GRAD_OP"),
    ),
    Strategy("fsdp1_no_shard", Kind.FSDP, "a replica in each process, version 1", _fsdp(1, "NO_SHARD")),
    Strategy(
        "fsdp1_hybrid_shard",
        Kind.FSDP,
        "sharded inside a machine, replicated between machines, version 1",
        _fsdp(1, "HYBRID_SHARD"),
        min_processes=4,
        min_machines=2,
    ),
    Strategy(
        "fsdp1_cpu_offload",
        Kind.FSDP,
        "sharded, shards rest in host memory, version 1",
        _fsdp(1, "FULL_SHARD", offload=True),
    ),
)

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
