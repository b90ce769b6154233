"""`python -m accel_parallel.train`: what every launcher starts, once per process."""

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from accel_parallel.arguments import positive
from accel_parallel.errors import AccelParallelError, LaunchError, Problem, SpecError, of_the_system
from accel_parallel.files import write_atomic
from accel_parallel.spec import Destination, RunSpec, destinations, find_spec, load_spec, parse_set
from accel_parallel.summary import render_summary
from accel_parallel.train.agent import die_with_parent


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    status = Status(arguments.status_dir)
    if arguments.status_dir:
        die_with_parent(signal.SIGKILL)
    try:
        check_environment(os.environ)
        spec = load(arguments.spec, arguments.set)
        summary = run(spec, arguments, status)
    except AccelParallelError as error:
        return status.failed(error.exit_code, error.problems)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if isinstance(error, OSError) and error.filename:
            return status.failed(2, of_the_system(error).problems)
        return status.crashed(error)
    if summary is not None:
        status.finished(summary)
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m accel_parallel.train", description=__doc__)
    result.add_argument("--spec", type=Path, help="specification (default: accelerate_configs/parallelism.yaml)")
    result.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key")
    result.add_argument("--run", type=Path, help="run directory to start in or continue")
    result.add_argument("--fresh", action="store_true", help="start a new run directory")
    result.add_argument("--cpu", action="store_true", help="use CPUs even where there are accelerators")
    result.add_argument("--keep-precision", action="store_true", help="on CPU, compute in the asked precision")
    result.add_argument("--stop-at", type=positive, metavar="STEP", help="save and stop after this step")
    result.add_argument("--status-dir", type=Path, help=argparse.SUPPRESS)
    return result


def check_environment(env: Mapping[str, str]) -> None:
    """Raises LaunchError if a variable that a launcher sets is not a number."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        if not env.get(name, "0").isdigit():
            raise LaunchError(f"the environment variable {name} is {env[name]!r}, not a number", hint=f"unset {name}")


def load(path: Path | None, sets: list[str]) -> RunSpec:
    """The specification, refusing overrides of what Accelerate's YAML has already decided."""
    carried = {key for key, destination, _ in destinations() if destination is Destination.YAML}
    refused = [key for key, _, _ in map(parse_set, sets) if key in carried]
    if refused:
        hint = "edit the specification and run `accel-parallel config`"
        raise SpecError(
            [Problem("is decided by the accelerate YAML", path=f"--set {key}", hint=hint) for key in refused]
        )
    return load_spec(find_spec(path), sets=sets)


def run(spec: RunSpec, arguments: argparse.Namespace, status: "Status") -> dict[str, Any] | None:
    # torch and accelerate take seconds to import: a wrong specification is reported before.
    from accel_parallel.train.session import Options, run_session
    from accel_parallel.train.stop import StopRequest

    options = Options(
        run=arguments.run,
        fresh=arguments.fresh,
        force_cpu=arguments.cpu,
        keep_precision=arguments.keep_precision,
        stop_at=arguments.stop_at,
    )
    stop = StopRequest(status.stop_flag)
    if status.stop_flag is None:
        # Under our launcher requests come as a file, and SIGTERM means that another rank has failed.
        stop.install()
    try:
        return run_session(spec, options, stop)
    finally:
        stop.restore()


class Status:
    """How this process tells its end: in a directory that the launcher reads, or else on the terminal."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        rank = os.environ.get("RANK", "0")
        self._rank = int(rank) if rank.isdigit() else 0

    @property
    def stop_flag(self) -> Path | None:
        return self._directory / "stop" if self._directory else None

    def finished(self, summary: dict[str, Any]) -> None:
        if self._directory:
            self._write("summary.json", summary)
        else:
            print(render_summary(summary))  # noqa: T201

    def failed(self, exit_code: int, problems: list[Problem], trace: str | None = None) -> int:
        if self._directory:
            error = {
                "rank": self._rank,
                "exit_code": exit_code,
                "problems": [problem.to_dict() for problem in problems],
                "traceback": trace,
                "time": time.time(),
            }
            self._write(f"error-{self._rank}.json", error)
            return exit_code
        if self._rank:
            # When all ranks fail of the same cause, the launcher ends this one before it repeats the main one's words.
            time.sleep(2)
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr, flush=True)  # noqa: T201
        if trace:
            print(trace, file=sys.stderr, flush=True)  # noqa: T201
        return exit_code

    def crashed(self, error: Exception) -> int:
        text = str(error).strip().splitlines()
        message = f"{type(error).__name__}: {text[0] if text else 'no message'} (rank {self._rank})"
        return self.failed(1, [Problem(message, code="crash")], traceback.format_exc())

    def _write(self, name: str, content: dict[str, Any]) -> None:
        assert self._directory is not None
        write_atomic(self._directory / name, json.dumps(content))


if __name__ == "__main__":
    code = main()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where the launcher was started with it closed
        with suppress(OSError):
            stream.flush()
    # Not sys.exit: see the runtime's _NEVER_FREED.
    os._exit(code)
