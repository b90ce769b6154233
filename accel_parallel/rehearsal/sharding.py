"""Whether a file shards and sends what it promises. What is promised is told from the shape, never from the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accel_parallel.asked import Asked, Parallelism
from accel_parallel.metrics import format_bytes
from accel_parallel.rehearsal.check import Check, table
from accel_parallel.shapes import ModelShape
from accel_parallel.units import Sharding, Unit, Wrapping, padded_size, shard_sizes, traffic, transformer_lm, units

SHARDED = "is it sharded?"
SENDS = "does it send what it should?"
BYTES = 4
"""Of a parameter, a gradient, or one of AdamW's two moments at rest: float32."""
STEP_BYTES = 4
"""AdamW counts its steps in one float32 tensor for each parameter (torch 2.13, CPU)."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What a strategy promises each process of a launch on CPUs. Without FSDP there are no `units`."""

    shape: ModelShape
    world_size: int
    replicates: bool
    sharding: Sharding | None
    units: tuple[Unit, ...]

    @classmethod
    def of(cls, asked: Asked, min_num_params: int, shape: ModelShape, *, low_precision: bool) -> "Promise":
        if not asked.fsdp:
            return cls(shape, asked.world_size, asked.world_size > 1, None, ())
        version = 2 if asked.parallelism is Parallelism.FSDP2 else 1
        reshards = asked.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD") and asked.shard_size > 1
        wrapping = Wrapping(
            version, asked.wrap_policy, asked.wrap_classes, min_num_params, reshards, low_precision=low_precision
        )
        found = units(transformer_lm(shape), wrapping)
        sharding = Sharding(
            version, asked.shard_size, asked.world_size // asked.shard_size, param_bytes=2 if low_precision else BYTES
        )
        return cls(shape, asked.world_size, False, sharding, tuple(unit for unit in found if unit.parameters))

    def held(self, rank: int) -> int:
        """Parameters that this process keeps, padding included."""
        if self.sharding is None:
            return self.shape.total_parameters
        # Ranks next to each other share a copy: the mesh is replicas x shards.
        return sum(shard_sizes(unit, self.sharding)[rank % self.sharding.shard_size] for unit in self.units)

    def traffic(self) -> dict[str, tuple[int, int]]:
        """Collectives of a forward and a backward pass by kind: how many, and bytes of the whole tensors.

        Of DDP the bytes only: how many buckets there are follows from the order of the gradients.
        """
        if self.sharding is None:
            return {"all_reduce": (0, self.shape.total_parameters * BYTES)} if self.replicates else {}
        total: dict[str, tuple[int, int]] = {}
        for (_, kind), (count, size) in traffic(self.units, self.sharding).items():
            before = total.get(kind, (0, 0))
            total[kind] = (before[0] + count, before[1] + size)
        return total


def is_sharded(promise: Promise, ranks: Sequence[Mapping[str, Any]]) -> Check:
    """Bytes of parameters, gradients and optimizer state of each process against the promise, and the units."""
    if not _seen(ranks):
        return Check("sharded", SHARDED, None, "no process prepared its model")
    mismatches, rows = [], []
    for rank in ranks:
        held, memory = promise.held(rank["rank"]), rank["memory"]
        expected = {"parameters": held * BYTES, "gradients": held * BYTES, "optimizer_state": 2 * held * BYTES}
        for key, wanted in expected.items():
            slack = STEP_BYTES * len(promise.shape.parameters()) if key == "optimizer_state" else 0
            if not wanted <= memory[key] <= wanted + slack:
                mismatches.append(
                    f"rank {rank['rank']} holds {memory[key]:,} bytes of {key.replace('_', ' ')}; promised: {wanted:,}"
                )
        shown = [memory[key] for key in (*expected, "between_steps", "peak")]
        rows.append([str(rank["rank"]), *map(format_bytes, shown), format_bytes(held * BYTES)])
    mismatches += _other_units(promise, ranks[0]["units"])
    whole = promise.shape.total_parameters
    share = max(promise.held(rank["rank"]) for rank in ranks) / whole
    number = len(promise.units)
    summary = f"{number} {'unit' if number == 1 else 'units'}, " if number else ""
    summary += f"each process holds {share:.1%} of {whole:,} parameters"
    header = ["rank", "parameters", "gradients", "optimizer", "at rest", "peak", "promised"]
    lines = (*table(header, rows), *_unit_table(promise, ranks[0]["units_traffic"]))
    return Check("sharded", SHARDED, not mismatches, summary, tuple(mismatches[:4]), lines)


def sends_what_it_should(promise: Promise, ranks: Sequence[Mapping[str, Any]]) -> Check:
    """Collectives of the forward and backward pass of one step against the promise, alike on all ranks."""
    if not _seen(ranks):
        return Check("sends", SENDS, None, "no step was looked at")
    mismatches = []
    if any(rank["traffic"] != ranks[0]["traffic"] for rank in ranks):
        mismatches.append("the processes counted different collectives")
    seen: dict[str, tuple[int, int]] = {}
    for item in ranks[0]["traffic"]:
        if item["phase"] in ("forward", "backward"):
            count, size = seen.get(item["kind"], (0, 0))
            seen[item["kind"]] = (count + item["count"], size + item["tensor_bytes"])
    wanted = promise.traffic()
    for kind in dict.fromkeys((*wanted, *seen)):
        (count, size), (got_count, got_size) = wanted.get(kind, (0, 0)), seen.get(kind, (0, 0))
        if size != got_size or (count and count != got_count):
            number = f"{count} x " if count else ""
            mismatches.append(
                f"{kind}: promised {number}{format_bytes(size)} a step, seen {got_count} x {format_bytes(got_size)}"
            )
    rows = [
        [item["phase"], item["kind"], str(item["group_size"]), str(item["count"]), format_bytes(item["tensor_bytes"]),
         format_bytes(item["sent_bytes"])]
        for item in ranks[0]["traffic"]
    ]  # fmt: skip
    sent = sum(item["sent_bytes"] for item in ranks[0]["traffic"])
    number = sum(item["count"] for item in ranks[0]["traffic"])
    summary = f"{number} collectives a step, {format_bytes(sent)} sent by each process" if number else "nothing"
    header = ["phase", "collective", "of", "number", "whole", "sent by each"]
    return Check("sends", SENDS, not mismatches, summary, tuple(mismatches), table(header, rows, left=2))


def _seen(ranks: Sequence[Mapping[str, Any]]) -> bool:
    return bool(ranks) and not any("error" in rank for rank in ranks)


def _other_units(promise: Promise, seen: Sequence[Mapping[str, Any]]) -> list[str]:
    """Units that are not the promised ones, by name and parameters."""
    told = {unit.name: sorted(unit.parameters) for unit in promise.units}
    got = {unit["name"]: sorted(unit["parameters"]) for unit in seen}
    found = [f"{name or 'the root'} should be a unit and is none" for name in told if name not in got]
    found += [f"{name or 'the root'} is a unit and should be none" for name in got if name not in told]
    found += [
        f"unit {name or 'root'} holds {', '.join(got[name])}; promised: {', '.join(told[name])}"
        for name in told
        if name in got and got[name] != told[name]
    ]
    return found


def _unit_table(promise: Promise, moved: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    if promise.sharding is None:
        return ()
    rows = []
    for unit in promise.units:
        own = [item for item in moved if item["unit"] == unit.name]
        collectives = ", ".join(f"{item['count']} {item['kind']}" for item in own) or "none"
        shard, whole = max(shard_sizes(unit, promise.sharding)), padded_size(unit, promise.sharding)
        sizes = [f"{unit.size:,}", format_bytes(shard * BYTES), format_bytes(whole * promise.sharding.param_bytes)]
        rows.append([unit.name or "(root)", *sizes, collectives])
    return ("", *table(["unit", "parameters", "shard", "gathered", "collectives of a step"], rows))
