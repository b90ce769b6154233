"""Whether a file shards and sends what it promises. What is promised is told from the shape, never from the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accel_parallel.explain import Plan, plan
from accel_parallel.metrics import format_bytes
from accel_parallel.rehearsal.check import Check, table
from accel_parallel.shapes import ModelShape
from accel_parallel.units import Unit, padded_size, shard_sizes, transformer_lm

SHARDED = "is it sharded?"
SENDS = "does it send what it should?"
BYTES = 4
"""Of a parameter, a gradient, or one of AdamW's two moments at rest: float32."""
STEP_BYTES = 4
"""AdamW counts its steps in one float32 tensor for each parameter (torch 2.13, CPU)."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What a launch promises each process, told from its environment and the shape of the model."""

    plan: Plan
    shape: ModelShape

    @classmethod
    def of(cls, environment: Mapping[str, str], shape: ModelShape) -> "Promise":
        """`environment` is a worker's, its world included."""
        return cls(plan(environment, transformer_lm(shape), own_loop=True), shape)

    @property
    def units(self) -> list[Unit]:
        """Those that hold parameters."""
        return [unit for unit in self.plan.units if unit.parameters]

    @property
    def stored(self) -> int:
        """Bytes of the parameters that each process keeps, and of their gradients. Both versions pad the last shard."""
        if not self.plan.asked.fsdp:
            return self.shape.total_parameters * BYTES
        sharding = self.plan.sharding
        return sum(padded_size(unit, sharding) for unit in self.units) // sharding.shard_size * BYTES

    def held(self, rank: int) -> int:
        """The same of this process's rows: what each of AdamW's moments takes, which are not padded in version 2."""
        if not self.plan.asked.fsdp:
            return self.stored
        # Ranks next to each other share a copy: the mesh is replicas x shards.
        return self.plan.shards[rank % self.plan.sharding.shard_size]

    def traffic(self) -> dict[str, tuple[int, int]]:
        """Collectives of a forward and a backward pass by kind: how many, and bytes of the whole tensors.

        Of DDP the bytes only: how many buckets there are follows from the order of the gradients.
        """
        if not self.plan.asked.fsdp:
            reduced = self.plan.asked.world_size > 1
            return {"all_reduce": (0, self.shape.total_parameters * BYTES)} if reduced else {}
        total: dict[str, tuple[int, int]] = {}
        for (_, kind), (count, size) in self.plan.traffic.items():
            before = total.get(kind, (0, 0))
            total[kind] = (before[0] + count, before[1] + size)
        return total


def is_sharded(promise: Promise, ranks: Sequence[Mapping[str, Any]]) -> Check:
    """Bytes of parameters, gradients and optimizer state of each process against the promise, and the units."""
    if not _seen(ranks):
        return Check("sharded", SHARDED, None, "no process prepared its model")
    mismatches, rows = [], []
    for rank in ranks:
        stored, memory = promise.stored, rank["memory"]
        expected = {"parameters": stored, "gradients": stored, "optimizer_state": 2 * promise.held(rank["rank"])}
        for key, wanted in expected.items():
            slack = STEP_BYTES * len(promise.shape.parameters()) if key == "optimizer_state" else 0
            if not wanted <= memory[key] <= wanted + slack:
                mismatches.append(
                    f"rank {rank['rank']} holds {memory[key]:,} bytes of {key.replace('_', ' ')}; promised: {wanted:,}"
                )
        shown = [memory[key] for key in (*expected, "between_steps", "peak")]
        rows.append([str(rank["rank"]), *map(format_bytes, shown), format_bytes(stored)])
    mismatches += _other_units(promise, ranks[0]["units"])
    whole = promise.shape.total_parameters
    share = promise.stored / (whole * BYTES)
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
    mismatches += other_traffic(promise, ranks[0]["traffic"])
    sent = sum(item["sent_bytes"] for item in ranks[0]["traffic"])
    number = sum(item["count"] for item in ranks[0]["traffic"])
    summary = f"{number} collectives a step, {format_bytes(sent)} sent by each process" if number else "nothing"
    return Check("sends", SENDS, not mismatches, summary, tuple(mismatches), traffic_table(ranks[0]["traffic"]))


def other_traffic(promise: Promise, traffic: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each kind of collective whose number or bytes are not the promised ones.

    One micro-batch: with gradient accumulation FSDP gathers and reduces for each of them.
    """
    seen: dict[str, tuple[int, int]] = {}
    for item in traffic:
        if item["phase"] in ("forward", "backward"):
            count, size = seen.get(item["kind"], (0, 0))
            seen[item["kind"]] = (count + item["count"], size + item["tensor_bytes"])
    wanted, mismatches = promise.traffic(), []
    for kind in dict.fromkeys((*wanted, *seen)):
        (count, size), (got_count, got_size) = wanted.get(kind, (0, 0)), seen.get(kind, (0, 0))
        if size != got_size or (count and count != got_count):
            number = f"{count} x " if count else ""
            mismatches.append(
                f"{kind}: promised {number}{size:,} bytes in all a step, seen {got_count} x {got_size:,} in all"
            )
    return mismatches


def traffic_table(traffic: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The collectives of one step for a person."""
    rows = [
        [item["phase"], item["kind"], str(item["group_size"]), str(item["count"]), format_bytes(item["tensor_bytes"]),
         format_bytes(item["sent_bytes"])]
        for item in traffic
    ]  # fmt: skip
    return table(["phase", "collective", "of", "number", "whole", "sent by each"], rows, left=2)


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
    if not promise.plan.asked.fsdp:
        return ()
    rows = []
    for unit in promise.units:
        own = [item for item in moved if item["unit"] == unit.name]
        collectives = ", ".join(f"{item['count']} {item['kind']}" for item in own) or "none"
        shard = max(shard_sizes(unit, promise.plan.sharding)) * BYTES
        sizes = [f"{unit.size:,}", format_bytes(shard), format_bytes(promise.plan.gathered(unit))]
        rows.append([unit.name or "(root)", *sizes, collectives])
    return ("", *table(["unit", "parameters", "shard", "gathered", "collectives of a step"], rows))
