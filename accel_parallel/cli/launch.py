"""`accel-parallel launch`: resolve the specification, open the run directory, start and supervise."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel_parallel.accelerate_yaml import render_file
from accel_parallel.errors import Problem, RunError
from accel_parallel.files import write_atomic
from accel_parallel.launch import LaunchPlan, check_machines, plan_launch, supervise
from accel_parallel.metrics import read_lines
from accel_parallel.runs import Run, newest_step, open_run
from accel_parallel.spec import RunSpec, find_spec, read_spec
from accel_parallel.strategies import Strategy, find_strategy
from accel_parallel.summary import render_summary


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line said."""

    strategy: str
    spec: Path | None
    sets: tuple[str, ...]
    num_processes: int | None
    cpu: bool
    keep_precision: bool
    run: Path | None
    fresh: bool
    stop_at: int | None
    machine_rank: int | None
    dry_run: bool


@dataclass(frozen=True, slots=True)
class Result:
    """What to print, and how to end."""

    data: dict[str, Any] | None
    lines: list[str]
    problems: list[Problem] = field(default_factory=list)
    exit_code: int = 0


def launch_strategy(request: Request, say: Callable[[str], None]) -> Result:
    """Do what was requested. Raises AccelParallelError before anything starts; the result says how it ended."""
    strategy = find_strategy(request.strategy)
    spec = resolve(request, strategy)
    check_machines(spec, request.machine_rank, request.run)
    config = render_file(spec, strategy, source="spec.yaml")
    if request.dry_run:
        return _dry_run(spec, strategy, config, request)
    run = open_run(spec, strategy.name, explicit=request.run, fresh=request.fresh)
    if run.note:
        say(run.note)
    step = newest_step(run.path)
    if step >= spec.training.steps:
        return _complete(run, step)
    _write(run.path / "accelerate.yaml", config)
    plan = plan_launch(spec, run.path, worker_arguments(request), machine_rank=request.machine_rank)
    if plan.note:
        say(plan.note)
    processes = "1 process" if spec.num_processes == 1 else f"{spec.num_processes} processes"
    say(f"{'continues' if step else 'starts'} {run.path}: {strategy.name}, {processes}")
    ended = supervise(plan)
    problems = list(ended.problems)
    if ended.traceback:
        trace = run.path / "traceback.txt"
        _write(trace, ended.traceback)
        problems = [Problem(p.message, code=p.code, hint=f"traceback in {trace}") for p in problems]
    lines = [render_summary(ended.summary)] if ended.summary else []
    return Result({"run": str(run.path), "summary": ended.summary}, lines, problems, ended.exit_code)


def resolve(request: Request, strategy: Strategy) -> RunSpec:
    """File, strategy, `--set`, `--num-processes`, in rising order. Raises SpecError."""
    sets = list(request.sets)
    if request.num_processes is not None:
        sets.append(f"distributed.processes_per_machine={request.num_processes}")
    strategy.refuse_contradictions(sets)
    return strategy.resolve(read_spec(find_spec(request.spec), sets))


def worker_arguments(request: Request) -> list[str]:
    arguments = ["--cpu"] if request.cpu else []
    arguments += ["--keep-precision"] if request.keep_precision else []
    arguments += ["--stop-at", str(request.stop_at)] if request.stop_at else []
    return arguments


def _dry_run(spec: RunSpec, strategy: Strategy, config: str, request: Request) -> Result:
    run = request.run or Path("runs") / f"{strategy.name}-NNN"
    plan: LaunchPlan = plan_launch(spec, run, worker_arguments(request), machine_rank=request.machine_rank)
    note = [f"# {plan.note}"] if plan.note else []
    lines = [f"# {plan.config}", config.rstrip("\n"), "", *note, plan.command()]
    return Result({"config": config, "command": plan.command()}, lines)


def _write(path: Path, text: str) -> None:
    try:
        write_atomic(path, text)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from None


def _complete(run: Run, step: int) -> Result:
    line = f"{run.path} is complete ({step} steps); --fresh starts a new run"
    summaries = read_lines(run.path / "summary.json")
    data = {"run": str(run.path), "complete": True, "summary": summaries[-1] if summaries else None}
    return Result(data, [line])
