"""The verb: which rehearsals, and what becomes of their answers."""

from collections.abc import Callable, Sequence
from pathlib import Path

from accel_parallel.cli.rehearsing.loop import rehearse_loop
from accel_parallel.cli.rehearsing.request import Request
from accel_parallel.cli.rehearsing.scale import simulate
from accel_parallel.cli.rehearsing.script import rehearse_script
from accel_parallel.errors import LaunchError, RunError
from accel_parallel.files import write_atomic
from accel_parallel.output import Result
from accel_parallel.rehearsal.check import Rehearsal
from accel_parallel.rehearsal.junit import to_junit
from accel_parallel.rehearsal.text import lines


def rehearse(request: Request, say: Callable[[str], None]) -> Result:
    """Rehearse the targets, or all strategies. Raises AccelParallelError where nothing can be rehearsed at all."""
    names = request.names()
    if request.junit and not request.junit.parent.is_dir():
        # Now, and not when all is done.
        raise LaunchError(f"cannot write {request.junit}: there is no folder {request.junit.parent}")
    if request.scale is not None:
        return _result([simulate(name, request.scale, request.spec, request.sets) for name in names], request)
    return _result((rehearse_script if request.script else rehearse_loop)(names, request), request)


def _result(results: Sequence[Rehearsal], request: Request) -> Result:
    if request.junit:
        _write(request.junit, to_junit(results))
    holds = all(result.holds for result in results)
    data = {"holds": holds, "rehearsals": [result.to_dict() for result in results]}
    return Result(data, lines(results), exit_code=0 if holds else 1)


def _write(path: Path, text: str) -> None:
    try:
        write_atomic(path, text)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}", hint="name another file with --junit") from None
