"""`accel-parallel checkpoints`: what a run has saved, whether it is intact, and whether it loads somewhere else."""

import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from accel_parallel.checkpoints import Checkpoint, list_checkpoints, wrong_digest
from accel_parallel.cli.target import Target, find_target
from accel_parallel.continuing import Change, Effect, changes
from accel_parallel.errors import LaunchError, RunError
from accel_parallel.metrics import format_bytes, format_processes
from accel_parallel.output import Result
from accel_parallel.runs import require_run


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line said. `target` is what stood after `--for`."""

    run: Path
    verify: bool = False
    target: str | None = None
    spec: Path | None = None
    sets: tuple[str, ...] = ()
    num_processes: int | None = None


def checkpoints(request: Request, say: Callable[[str], None]) -> Result:
    """List them, read their digests, or compare the newest with what a launch would ask for.

    Raises RunError if there is no such run, SpecError or LaunchError if what is asked for cannot be launched at all.
    """
    if request.target is None and (request.spec or request.sets or request.num_processes):
        raise LaunchError("--spec, --set and --num-processes belong to --for", hint="name a strategy with --for")
    require_run(request.run)
    found = list_checkpoints(request.run)
    if request.verify:
        found = [_verified(each, say) for each in found]
    if request.target is not None:
        target = find_target(request.target, request.spec, request.sets, request.num_processes, own_loop=True)
        return _preflight(request, target, found)
    damaged = any(each.damage for each in found)
    data = {"run": str(request.run), "checkpoints": [_as_dict(each) for each in found]}
    lines = [_HEADER, *map(_row, found)] if found else [f"{request.run} has no checkpoints"]
    return Result(data, lines, exit_code=1 if request.verify and damaged else 0)


def _verified(found: Checkpoint, say: Callable[[str], None]) -> Checkpoint:
    if found.damage is not None:
        return found
    say(f"reading {found.path.name}, {format_bytes(found.bytes)}")
    return replace(found, damage=wrong_digest(found))


def _as_dict(found: Checkpoint) -> dict[str, Any]:
    manifest = found.manifest
    return {
        "step": found.step,
        "path": str(found.path),
        "state": "damaged" if found.damage else "complete",
        "damage": found.damage,
        "strategy": manifest.strategy if manifest else None,
        "world_size": manifest.world_size if manifest else None,
        "bytes": found.bytes if manifest else None,
        "written": manifest.written if manifest else None,
    }


_HEADER = f"{'step':>9}  {'strategy':20} {'processes':>9} {'size':>11}  {'age':>8}  state"


def _row(found: Checkpoint) -> str:
    if found.manifest is None:
        return f"{found.step:9}  damaged: {found.damage}"
    manifest, age = found.manifest, _age(time.time() - found.manifest.written)
    row = f"{found.step:9}  {manifest.strategy:20} {manifest.world_size:9} {format_bytes(found.bytes):>11}  {age:>8}  "
    return f"{row}damaged:\n{'':11}{found.damage}" if found.damage else f"{row}complete"


def _age(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _preflight(request: Request, target: Target, found: list[Checkpoint]) -> Result:
    newest = next((each for each in reversed(found) if each.damage is None), None)
    if newest is None or newest.manifest is None:
        raise RunError(f"{request.run} has no complete checkpoint", hint="a launch with --run starts it from the start")
    manifest, spec = newest.manifest, target.spec
    differing = changes(manifest.flat_spec, spec)
    loads = not any(change.effect.refused for change in differing)
    there = f"{target.name}, {format_processes(spec.num_processes)}"
    lines = [
        f"{newest.path}: {manifest.strategy}, {format_processes(manifest.world_size)}",
        f"{'loads' if loads else 'does not load'} under {there}",
        *_grouped(differing),
    ]
    command = _command(request) if loads else None
    if command:
        remaining = spec.training.steps - newest.step
        lines += [
            "",
            f"{remaining} steps are left" if remaining > 0 else "no step is left: training.steps is reached",
            command,
        ]
    data = {
        "run": str(request.run),
        "checkpoint": _as_dict(newest),
        "strategy": target.name,
        "world_size": spec.num_processes,
        "loads": loads,
        "changes": [{**asdict(change), "effect": change.effect.name.lower()} for change in differing],
        "command": command,
    }
    return Result(data, lines, exit_code=0 if loads else 1)


def _grouped(differing: list[Change]) -> list[str]:
    """The changes under what they do, the worst first."""
    lines = []
    for effect in Effect:
        keys = [f"    {change}" for change in differing if change.effect is effect]
        lines += [f"  {effect.value}:", *keys] if keys else []
    return lines or ["  with the same specification"]


def _command(request: Request) -> str:
    """The launch that was asked about."""
    words = ["accel-parallel", "launch", str(request.target), "--run", str(request.run)]
    words += ["--spec", str(request.spec)] if request.spec else []
    words += ["--num-processes", str(request.num_processes)] if request.num_processes else []
    for entry in request.sets:
        words += ["--set", entry]
    return shlex.join(words)
