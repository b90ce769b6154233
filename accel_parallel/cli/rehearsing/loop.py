"""Rehearsing the project's own loop under files, a few steps each, against one process."""

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from accel_parallel.accelerate_yaml import render_file
from accel_parallel.cli.rehearsing.request import Request
from accel_parallel.cli.rehearsing.tasks import Work, carry_out, file_of, found_or_refused, in_order
from accel_parallel.cli.target import Target, find_target
from accel_parallel.errors import LaunchError
from accel_parallel.metrics import format_bytes, format_processes
from accel_parallel.rehearsal.check import Rehearsal
from accel_parallel.rehearsal.judge import judge
from accel_parallel.spec import RunSpec, find_spec, read_spec
from accel_parallel.strategies import STRATEGIES

# Few steps at the full learning rate. What the user sets wins.
SHORT = ("training.steps=4", "training.warmup_steps=0")
REFERENCE = "single"


def rehearse_loop(names: Sequence[str], request: Request) -> list[Rehearsal]:
    """One rehearsal for each name. Raises AccelParallelError where a strategy cannot be rehearsed at all."""
    sets = (*SHORT, f"training.batch_size={_batch_size(names, request)}", *request.sets)
    processes = request.num_processes

    def find(name: str) -> Target:
        return find_target(name, request.spec, sets, processes, own_loop=True)

    found = [found_or_refused(name, find) for name in names]
    targets = [target for target in found if isinstance(target, Target)]
    if targets:
        check_memory(targets)
    with tempfile.TemporaryDirectory(prefix="accel-parallel-") as folder:
        return in_order(found, _run(targets, request, Path(folder)))


def _batch_size(names: Sequence[str], request: Request) -> int:
    """The smallest that divides by the processes of each: one sequence for each process and micro-batch."""
    accumulation = read_spec(find_spec(request.spec), request.sets).resolve().training.grad_accum_steps
    return accumulation * math.lcm(*map(request.processes, names))


def check_memory(targets: Sequence[Target]) -> None:
    """Raises LaunchError if the weights, gradients and moments of all processes do not fit in this machine's memory.

    16 bytes a parameter: float32 weights, gradients and AdamW's two moments. Every process holds them all under DDP,
    and under FSDP its share of them beside the weights that it starts from.
    """
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for target in targets:
        parameters, processes = target.spec.model.shape.total_parameters, target.spec.num_processes
        sharded = target.environment.get("ACCELERATE_USE_FSDP") == "true"
        needed = parameters * (16 + 4 * processes if sharded else 16 * processes)
        if needed > available:
            raise LaunchError(
                f"{target.name}: {parameters:,} parameters in {format_processes(processes)} take "
                f"{format_bytes(needed)}, this machine has {format_bytes(available)} to give",
                hint="rehearse a smaller shape with --set model.num_layers=2 or model.preset=tiny, or use --scale",
            )


def _run(targets: Sequence[Target], request: Request, folder: Path) -> list[Rehearsal]:
    """Each precision's reference first."""
    keep = request.keep_precision
    specs = [short(target.spec) for target in targets]
    references = {spec.distributed.mixed_precision: _reference(spec, keep) for spec in specs}
    works = [
        Work(target.name, file_of(target), spec, keep_precision=keep)
        for target, spec in zip(targets, specs, strict=True)
    ]
    facts = carry_out([*references.values(), *works], folder)
    numbers = dict(zip(references, [seen["steps"] for seen in facts], strict=False))
    return [
        judge(
            target.name,
            spec,
            target.environment,
            seen,
            numbers[spec.distributed.mixed_precision],
            keep_precision=keep,
        )
        for target, spec, seen in zip(targets, specs, facts[len(references) :], strict=True)
    ]


def short(spec: RunSpec) -> RunSpec:
    """The specification with a report after each step, and a checkpoint before the last one and after it."""
    checkpoint = {"every": max(spec.training.steps - 1, 1), "keep": 2, "async_": False, "verify": True}
    logging = {"every": 1, "eval_every": 0, "eval_batches": 1, "trackers": ()}
    sections = {
        "checkpoint": spec.checkpoint.model_copy(update=checkpoint),
        "logging": spec.logging.model_copy(update=logging),
    }
    return spec.model_copy(update=sections)


def _reference(spec: RunSpec, keep_precision: bool) -> Work:
    """One process with the same batch."""
    alone = spec.with_world(1, 1)
    config = render_file(alone, STRATEGIES[REFERENCE], source="spec.yaml")
    return Work("reference", config, alone, reference=True, keep_precision=keep_precision)
