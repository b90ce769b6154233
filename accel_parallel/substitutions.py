"""What a launch on CPUs does differently: one table, printed at the start, recorded with the run and published.

A substitution is something that CPUs cannot do and that does not change what is learned. It is reported and is no
mismatch; everything else that differs from what was asked is one, and stops the run.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from accel_parallel.asked import Asked, Parallelism


@dataclass(frozen=True, slots=True)
class Substitution:
    """`key` was asked to be `asked` and is `got` in this process, for this reason."""

    key: str
    asked: str
    got: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {self.asked} -> {self.got} ({self.reason})"

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Launch:
    """What decides which rows of the table apply. `environment` is the launcher's."""

    asked: Asked
    backend: str
    keep_precision: bool
    environment: Mapping[str, str]

    def wants(self, key: str) -> bool:
        return self.environment.get(key.upper(), "false").lower() == "true"

    @property
    def version1(self) -> bool:
        return self.asked.parallelism is Parallelism.FSDP1


@dataclass(frozen=True, slots=True)
class Row:
    """One row: `when` says for people what `applies` decides. "{precision}" in `asked` is the launch's own."""

    key: str
    when: str
    asked: str
    got: str
    reason: str
    applies: Callable[[Launch], bool]

    def substitution(self, precision: str = "bf16") -> Substitution:
        return Substitution(self.key, self.asked.format(precision=precision), self.got, self.reason)


_EVERY_PROCESS_FILLS = "version 1 needs a device for it; every process initialises the same weights instead"

TABLE = (
    Row("device", "always", "accelerator", "cpu", "no accelerator is used", lambda launch: True),
    Row(
        "distributed.backend", "several processes", "nccl", "gloo", "NCCL needs GPUs",
        lambda launch: launch.backend != "gloo" and launch.asked.world_size > 1,
    ),
    Row(
        "mixed_precision", "16 bits asked, without --keep-precision", "{precision}", "no",
        "16-bit products are emulated on CPUs without bf16 units; --keep-precision keeps it",
        lambda launch: launch.asked.mixed_precision != "no" and not launch.keep_precision,
    ),
    Row(
        "fsdp_sync_module_states", "FSDP version 1", "true", "false", _EVERY_PROCESS_FILLS,
        lambda launch: launch.version1 and launch.wants("fsdp_sync_module_states"),
    ),
    Row(
        "fsdp_cpu_ram_efficient_loading", "FSDP version 1", "true", "false", _EVERY_PROCESS_FILLS,
        lambda launch: launch.version1 and launch.wants("fsdp_cpu_ram_efficient_loading"),
    ),
    Row(
        "fsdp_offload_params", "FSDP version 2, offloaded", "pinned", "unpinned", "pinned memory needs a device",
        lambda launch: launch.asked.cpu_offload and not launch.version1,
    ),
    Row(
        "fsdp_offload_params", "FSDP version 1, offloaded", "true", "false",
        "version 1 offloads from a device; everything is in host memory anyway",
        lambda launch: launch.asked.cpu_offload and launch.version1,
    ),
    Row(
        "fsdp_sharding_strategy", "FSDP version 1, HYBRID_SHARD", "a shard per GPU of a machine",
        "a shard per process of a machine", "version 1 counts devices, and a CPU counts as one",
        lambda launch: launch.version1 and launch.asked.sharding_strategy.startswith("HYBRID_SHARD"),
    ),
)  # fmt: skip


def substitutions(
    asked: Asked, backend: str, keep_precision: bool, environment: Mapping[str, str] = os.environ
) -> list[Substitution]:
    """Everything this launch gets differently because it runs on CPUs, before its environment is changed for it."""
    launch = Launch(asked, backend, keep_precision, environment)
    return [row.substitution(asked.mixed_precision) for row in TABLE if row.applies(launch)]


def of_plugin(key: str, version: int) -> Substitution:
    """The same for a plugin that a script builds itself, of this version of FSDP."""
    row = next(row for row in TABLE if row.key == key and row.when.startswith(f"FSDP version {version}"))
    return row.substitution()
