"""`accel-parallel rehearse`: run a file on CPU processes, really sharded, and compare it with what it asks for."""

import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from accel_parallel.accelerate_yaml import loads, names_a_file, read_file, render_file
from accel_parallel.cli.heavy import call_heavy
from accel_parallel.cli.scale import simulate
from accel_parallel.cli.target import Target, find_target
from accel_parallel.errors import LaunchError, RunError
from accel_parallel.files import write_atomic
from accel_parallel.metrics import format_bytes, format_processes
from accel_parallel.output import Result
from accel_parallel.rehearsal.check import Rehearsal
from accel_parallel.rehearsal.judge import judge, refused
from accel_parallel.rehearsal.junit import to_junit
from accel_parallel.rehearsal.text import lines
from accel_parallel.spec import RunSpec, dump_spec, find_spec, read_spec
from accel_parallel.strategies import CATALOGUE, STRATEGIES, find_strategy

# Few steps at the full learning rate. What the user sets wins.
SHORT = ("training.steps=4", "training.warmup_steps=0")
REFERENCE = "single"


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line said; `targets` is empty with `all`."""

    targets: tuple[str, ...]
    all: bool = False
    spec: Path | None = None
    sets: tuple[str, ...] = ()
    num_processes: int | None = None
    keep_precision: bool = False
    junit: Path | None = None
    scale: int | None = None


def rehearse(request: Request, say: Callable[[str], None]) -> Result:
    """Rehearse the targets, or all strategies. Raises AccelParallelError where nothing can be rehearsed at all."""
    names = _names(request)
    if request.junit and not request.junit.parent.is_dir():
        # Now, and not when all is done.
        raise LaunchError(f"cannot write {request.junit}: there is no folder {request.junit.parent}")
    if request.scale is not None:
        return _result([simulate(name, request.scale, request.spec, request.sets) for name in names], request)
    sets = (*SHORT, f"training.batch_size={_batch_size(names, request)}", *request.sets)
    found = [_find(name, sets, request) for name in names]
    targets = [target for target in found if isinstance(target, Target)]
    if targets:
        check_memory(targets)
    with tempfile.TemporaryDirectory(prefix="accel-parallel-") as name:
        rehearsals = iter(_run(targets, sets, request, Path(name)))
        results = [next(rehearsals) if isinstance(each, Target) else each for each in found]
    return _result(results, request)


def _result(results: Sequence[Rehearsal], request: Request) -> Result:
    if request.junit:
        _write(request.junit, to_junit(results))
    holds = all(result.holds for result in results)
    data = {"holds": holds, "rehearsals": [result.to_dict() for result in results]}
    return Result(data, lines(results), exit_code=0 if holds else 1)


def _names(request: Request) -> Sequence[str]:
    if bool(request.targets) == request.all:
        raise LaunchError("rehearse what? strategies or accelerate YAML files, or --all for every strategy")
    if request.scale is not None and (request.all or request.num_processes or request.keep_precision):
        raise LaunchError("--scale says how many processes there are, and keeps the precision; it goes with no --all")
    if request.all and request.num_processes is not None:
        raise LaunchError("--all has processes of its own for each strategy", hint="leave --num-processes out")
    return [strategy.name for strategy in CATALOGUE] if request.all else request.targets


def _batch_size(names: Sequence[str], request: Request) -> int:
    """The smallest that divides by the processes of each: one sequence for each process and micro-batch."""
    worlds = [_processes(name, request) for name in names]
    accumulation = read_spec(find_spec(request.spec), request.sets).resolve().training.grad_accum_steps
    return accumulation * math.lcm(*worlds)


def _processes(name: str, request: Request) -> int:
    """Processes over all machines."""
    if name not in STRATEGIES and names_a_file(name):
        file = read_file(Path(name))
        return request.num_processes * file.num_machines if request.num_processes else file.num_processes or 1
    sets = request.sets
    if request.num_processes is not None:
        sets = (*sets, f"distributed.processes_per_machine={request.num_processes}")
    return find_strategy(name).resolve(read_spec(find_spec(request.spec), sets)).num_processes


def _find(name: str, sets: tuple[str, ...], request: Request) -> Target | Rehearsal:
    """The target, or what is wrong with the file before anything can start."""
    try:
        return find_target(name, request.spec, sets, request.num_processes, own_loop=True)
    except LaunchError as error:
        if name in STRATEGIES or not names_a_file(name):
            raise
        return refused(Path(name).stem, error)


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


def _run(targets: Sequence[Target], sets: tuple[str, ...], request: Request, folder: Path) -> list[Rehearsal]:
    """One pool of processes runs them all, each precision's reference first."""
    if not targets:
        return []
    specs = [short(target.spec) for target in targets]
    references = {spec.distributed.mixed_precision: _reference(spec) for spec in specs}
    tasks = [
        {**_task(folder / f"reference-{precision}", "reference", config, spec, request), "reference": True}
        for precision, (config, spec) in references.items()
    ]
    places = [folder / f"{number:02d}" for number in range(len(targets))]
    for place, target, spec in zip(places, targets, specs, strict=True):
        tasks.append({**_task(place, target.name, _config(target), spec, request), "reference": False})
    write_atomic(folder / "tasks.json", json.dumps(tasks))
    code = call_heavy("rehearse", [str(folder)])
    facts = [_facts(place, code) for place in places]
    numbers = {precision: _facts(folder / f"reference-{precision}", code)["steps"] for precision in references}
    return [
        judge(
            target.name,
            spec,
            target.environment,
            seen,
            numbers[spec.distributed.mixed_precision],
            keep_precision=request.keep_precision,
        )
        for target, spec, seen in zip(targets, specs, facts, strict=True)
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


def _reference(spec: RunSpec) -> tuple[str, RunSpec]:
    """One process with the same batch, as an accelerate file and its specification."""
    alone = spec.with_world(1, 1)
    return render_file(alone, STRATEGIES[REFERENCE], source="spec.yaml"), alone


def _config(target: Target) -> str:
    """The file, with the number of processes that the command line gives instead of it."""
    if not target.launcher_arguments:
        return target.config
    return yaml.safe_dump({**loads(target.config), "num_processes": target.spec.num_processes}, sort_keys=False)


def _task(folder: Path, name: str, config: str, spec: RunSpec, request: Request) -> dict[str, Any]:
    folder.mkdir()
    (folder / "accelerate.yaml").write_text(config, encoding="utf-8")
    (folder / "spec.yaml").write_text(dump_spec(spec), encoding="utf-8")
    return {
        "folder": folder.name,
        "name": name,
        "processes": spec.num_processes,
        "machines": spec.distributed.num_machines,
        "keep_precision": request.keep_precision,
    }


def _write(path: Path, text: str) -> None:
    try:
        write_atomic(path, text)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}", hint="name another file with --junit") from None


def _facts(folder: Path, code: int) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise RunError(f"the rehearsal ended without a result: {how}") from None
    return facts
