"""`accel-parallel launch`: find what to launch, open the run directory, start and supervise."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from accel_parallel.checkpoints import newest_step
from accel_parallel.cli.generations import Training, say_trace, start_script_again, write
from accel_parallel.cli.script import check_script, check_sets
from accel_parallel.cli.target import Target, find_target
from accel_parallel.errors import LaunchError
from accel_parallel.init_from import check_init_from
from accel_parallel.launch import LOOP, SCRIPT, LaunchPlan, check_machines, plan_launch, shell_environment
from accel_parallel.locks import Lock, hold_as_launcher
from accel_parallel.metrics import format_processes, read_lines
from accel_parallel.output import Result
from accel_parallel.restarts import run_generations
from accel_parallel.runs import Run, continued_by, discard_partial_checkpoints, open_run
from accel_parallel.summary import render_summary


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line said. `script` is what stood after `--`."""

    target: str
    spec: Path | None = None
    sets: tuple[str, ...] = ()
    num_processes: int | None = None
    cpu: bool = False
    keep_precision: bool = False
    run: Path | None = None
    fresh: bool = False
    stop_at: int | None = None
    machine_rank: int | None = None
    max_restarts: int = 0
    dry_run: bool = False
    print_env: bool = False
    fsdp_in_script: bool = False
    script: tuple[str, ...] = ()


def launch(request: Request, say: Callable[[str], None]) -> Result:
    """Do what was requested. Raises AccelParallelError before anything starts; the result says how it ended."""
    if request.script and (request.run or request.fresh or request.stop_at):
        raise LaunchError("--run, --fresh and --stop-at belong to the training loop, not to a script of yours")
    if request.fsdp_in_script and not request.script:
        raise LaunchError("--fsdp-in-script belongs to a script of yours, not to the training loop")
    if request.script and request.print_env:
        raise LaunchError("--print-env is about the training loop", hint="leave the script out")
    if request.max_restarts and request.print_env:
        raise LaunchError("--max-restarts is about a launch of ours, not about torchrun's", hint="leave it out")
    check_script(request.script)
    threads = os.environ.get("OMP_NUM_THREADS", "").strip()
    if threads and not threads.isdecimal():
        raise LaunchError(f"the environment variable OMP_NUM_THREADS is {threads!r}, not a number", hint="unset it")
    if request.script:
        check_sets(request.sets)
    target = find_target(request.target, request.spec, request.sets, request.num_processes, own_loop=not request.script)
    for note in target.notes:
        say(note)
    if request.print_env:
        return _print_env(target)
    check_machines(target.spec, request.machine_rank)
    if not request.script:
        _check_first_weights(target, request)
    if request.dry_run:
        return _dry_run(target, request)
    if request.script:
        return _launch_script(target, request, say)
    return _launch_loop(target, request, say)


def _check_first_weights(target: Target, request: Request) -> None:
    """A run that has a checkpoint goes on from that, whatever became of the folder it once started from."""
    spec = target.spec
    # The other machines need not have the folder: their processes may receive the weights.
    if spec.model.init_from is None or request.machine_rank not in (None, 0):
        return
    run = continued_by(spec, target.name, explicit=request.run, fresh=request.fresh)
    if run is None or newest_step(run) == 0:
        check_init_from(spec.model)


def _launch_loop(target: Target, request: Request, say: Callable[[str], None]) -> Result:
    spec, machines = target.spec, target.spec.distributed.num_machines
    if machines > 1 and request.run is None:
        raise LaunchError(f"{machines} machines have to share one run directory", hint="name it with --run on each")
    main = request.machine_rank in (None, 0)
    held: list[Lock] = []
    try:
        # The other machines share the directory, and write nothing into it that the first does not.
        claim = (lambda path: held.append(hold_as_launcher(path))) if main else (lambda path: None)
        run = open_run(spec, target.name, explicit=request.run, fresh=request.fresh, claim=claim)
        result = _launch_run(target, request, run, say)
        if result.exit_code and main:
            discard_partial_checkpoints(run.path)
        return result
    finally:
        for lock in held:
            lock.release()


def _launch_run(target: Target, request: Request, run: Run, say: Callable[[str], None]) -> Result:
    spec = target.spec
    if run.note:
        say(run.note)
    step = newest_step(run.path)
    if step >= spec.training.steps:
        return _complete(run, step)
    config = run.path / "accelerate.yaml"
    write(config, target.config)
    changes = f" ({'; '.join(run.told_changes)})" if step and run.told_changes else ""
    does, processes = "continues" if step else "starts", format_processes(spec.num_processes)
    line = f"{does} {run.path}: {target.name}, {processes}{changes}"
    training = Training(run, spec.training.steps, request.machine_rank or 0, say)
    plan = partial(_next_plan, target, request, config, run.path, say)
    ended = run_generations(plan, lambda: say(line), training.again, request.max_restarts)
    if ended is None:
        return _complete(run, newest_step(run.path))
    lines = [render_summary(ended.summary)] if ended.summary else []
    data = {"run": str(run.path), "restarts": ended.restarts, "summary": ended.summary}
    return Result(data, lines, training.problems(ended), ended.exit_code)


def _launch_script(target: Target, request: Request, say: Callable[[str], None]) -> Result:
    with tempfile.TemporaryDirectory(prefix="accel-parallel-") as folder:
        config = Path(folder) / "accelerate.yaml"
        write(config, target.config)
        plan = partial(_next_plan, target, request, config, None, say)
        line = f"starts {' '.join(request.script)}: {target.name}, {format_processes(target.spec.num_processes)}"
        again = partial(start_script_again, say=say)
        ended = run_generations(plan, lambda: say(line), again, request.max_restarts)
    assert ended is not None  # of a script nobody knows that nothing is left to do
    say_trace(ended, say)
    data = {"script": list(request.script), "restarts": ended.restarts}
    return Result(data, [], ended.problems, ended.exit_code)


def _next_plan(
    target: Target, request: Request, config: Path, run: Path | None, say: Callable[[str], None]
) -> LaunchPlan:
    plan = _plan(target, request, config, run)
    if plan.note:
        say(plan.note)
    return plan


def _plan(target: Target, request: Request, config: Path, run: Path | None = None) -> LaunchPlan:
    worker = ["--cpu"] if request.cpu else []
    worker += ["--keep-precision"] if request.keep_precision else []
    if request.script:
        worker += ["--fsdp-in-script"] if request.fsdp_in_script else []
        module = request.script[0] == "-m"
        worker += ["--module", *request.script[1:]] if module else list(request.script)
    else:
        worker += ["--stop-at", str(request.stop_at)] if request.stop_at else []
        worker = ["--spec", f"{run}/spec.yaml", "--run", str(run), *worker]
    return plan_launch(
        target.spec,
        config,
        worker,
        module=SCRIPT if request.script else LOOP,
        launcher_arguments=target.launcher_arguments,
        machine_rank=request.machine_rank,
    )


def _print_env(target: Target) -> Result:
    lines = shell_environment(target.environment, os.environ, target.spec.num_processes)
    return Result({"environment": target.environment}, lines)


def _dry_run(target: Target, request: Request) -> Result:
    run = request.run or Path("runs") / f"{target.name}-NNN"
    # Under a script the file is a temporary one.
    config = Path(f"{target.name}.yaml") if request.script else run / "accelerate.yaml"
    plan = _plan(target, request, config, run)
    note = [f"# {plan.note}"] if plan.note else []
    note += [f"# accel-parallel would restart this up to {request.max_restarts} times"] if request.max_restarts else []
    exported = [f"{key}={value}" for key, value in target.environment.items()]
    lines = [f"# {plan.config}", target.config.rstrip("\n"), ""]
    if exported:
        lines += ["# what Accelerate's launcher exports to each process, besides its rank", *exported, ""]
    lines += [*note, plan.command()]
    return Result({"config": target.config, "environment": target.environment, "command": plan.command()}, lines)


def _complete(run: Run, step: int) -> Result:
    changes = f", and asked for now with {'; '.join(run.told_changes)}" if run.told_changes else ""
    line = f"{run.path} is complete ({step} steps){changes}; --fresh starts a new run"
    summaries = read_lines(run.path / "summary.json")
    data = {"run": str(run.path), "complete": True, "summary": summaries[-1] if summaries else None}
    return Result(data, [line])
