"""`accel-parallel rehearse --scale N`: a step on fake tensors in a world of any size, in one process."""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from accel_parallel.accelerate_yaml import names_a_file, read_file
from accel_parallel.cli.heavy import call_heavy
from accel_parallel.cli.target import Target, find_target, target_of_file
from accel_parallel.errors import LaunchError, RunError
from accel_parallel.launch import without_traces
from accel_parallel.metrics import format_bytes
from accel_parallel.rehearsal.check import Check, Rehearsal, table
from accel_parallel.rehearsal.sharding import BYTES, Promise, sends_what_it_should
from accel_parallel.spec import dump_spec, find_spec, read_spec
from accel_parallel.strategies import STRATEGIES, find_strategy

PER_MACHINE = 8
"""Processes of a machine of the simulated world."""


def simulate(name: str, world_size: int, spec: Path | None, sets: tuple[str, ...]) -> Rehearsal:
    """One step of process 0 among `world_size`, eight on a machine, each with the micro-batch that `spec` gives it.

    Raises LaunchError for a world that cannot be, or a strategy that cannot be simulated.
    """
    target, local = _target(name, world_size, spec, sets)
    with tempfile.TemporaryDirectory(prefix="accel-parallel-") as folder:
        specification, out = Path(folder) / "spec.yaml", Path(folder) / "out.json"
        specification.write_text(dump_spec(target.spec), encoding="utf-8")
        words = ["--spec", specification, "--world-size", world_size, "--local-world-size", local, "--out", out]
        environment = {**without_traces(os.environ), **target.environment}
        code = call_heavy("scale", list(map(str, words)), env=environment, stdout=subprocess.DEVNULL)
        if code == 2:
            raise LaunchError(f"{name} cannot be simulated on {world_size} processes", hint="the line above says why")
        if code or not out.exists():
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise RunError(f"the simulation ended without a result: {how}")
        seen: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    world = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(local)}
    return _judge(target, Promise.of({**target.environment, **world}, target.spec.model.shape), seen)


def _target(name: str, world_size: int, spec: Path | None, sets: tuple[str, ...]) -> tuple[Target, int]:
    """The strategy or file as it is on that many processes, and how many of them a machine has."""
    local = min(PER_MACHINE, world_size)
    if world_size < 2 or world_size % local:
        below, above = world_size // local * local, (world_size // local + 1) * local
        hint = f"nearest that can be: {below or 2} or {above}" if world_size > 1 else "2 or more"
        raise LaunchError(f"--scale {world_size} is no world of machines with {local} processes each", hint=hint)
    file = read_file(Path(name)) if name not in STRATEGIES and names_a_file(name) else None
    if name == "single" or (file and file.kind not in ("MULTI_GPU", "FSDP")):
        kind = f"{name}, of distributed_type {file.kind}" if file else name
        raise LaunchError(f"--scale simulates several processes under DDP or FSDP, not {kind}", hint="such as fsdp")
    draft = read_spec(find_spec(spec), sets)
    asked = draft.resolve() if file else find_strategy(name).resolve(draft)
    processes = (file.num_processes or 1) if file else asked.num_processes
    micro_batch = max(1, asked.training.batch_size // (processes * asked.training.grad_accum_steps))
    batch = f"training.batch_size={micro_batch * world_size * asked.training.grad_accum_steps}"
    if file:
        world = {"num_machines": world_size // local, "num_processes": world_size}
        config = {**file.config, **world}
        file = replace(file, config=config, text=yaml.safe_dump(config, sort_keys=False))
        return target_of_file(file, spec, (*sets, batch), None, own_loop=True), local
    machines = f"distributed.num_machines={world_size // local}"
    return find_target(name, spec, (*sets, machines, f"distributed.processes_per_machine={local}", batch), None,
                       own_loop=True), local  # fmt: skip


def _judge(target: Target, promise: Promise, seen: Mapping[str, Any]) -> Rehearsal:
    memory, shard = seen["memory"], seen["shard"]
    held = f"{memory['parameters']:,} bytes of parameters"
    wrong = [] if memory["parameters"] == promise.stored else [f"rank 0 holds {held}; promised: {promise.stored:,}"]
    rows = [[key.replace("_", " "), format_bytes(value)] for key, value in memory.items()]
    sizes = {"shard, without padding": shard["this_rank"], "smallest shard": shard["smallest"]}
    sizes |= {"largest shard": shard["largest"], "an even share": shard["even"]}
    rows += [[key, format_bytes(value)] for key, value in sizes.items()]
    whole = promise.shape.total_parameters
    share = f"{promise.stored / (whole * BYTES):.2%} of {whole:,} parameters, at most {format_bytes(memory['peak'])}"
    checks = (
        Check("sharded", "is it sharded?", not wrong, share, tuple(wrong), table(["rank 0 holds", ""], rows)),
        sends_what_it_should(promise, [seen]),
    )
    size = seen["world_size"]
    title = f"{target.name}, simulated on {size:,} processes (fake tensors: none of them ran)"
    notes = (f"{seen['seconds']:.0f} s in one process that held {format_bytes(seen['peak_rss_bytes'])}",)
    return Rehearsal(target.name, title, checks, seen["seconds"], dict(seen), notes)
