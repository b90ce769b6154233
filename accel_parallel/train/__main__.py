"""`python -m accel_parallel.train`: what every launcher starts, once per process."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_parallel.arguments import positive
from accel_parallel.errors import LaunchError, Problem, SpecError
from accel_parallel.spec import Destination, RunSpec, destinations, find_spec, load_spec, parse_set
from accel_parallel.train.control import Control
from accel_parallel.train.status import Status, end_process, open_status


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    status = open_status(arguments.status_dir)
    return status.run(lambda: work(arguments, status))


def work(arguments: argparse.Namespace, status: Status) -> dict[str, Any] | None:
    check_environment(os.environ)
    spec = load(arguments.spec, arguments.set)
    return run(spec, arguments, status.control)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m accel_parallel.train", description=__doc__)
    result.add_argument("--spec", type=Path, help="specification (default: accelerate_configs/parallelism.yaml)")
    result.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key")
    # torchrun takes --run for an abbreviation of an option of its own, wherever it stands.
    result.add_argument("--run", "--run-dir", type=Path, help="run directory to start in or continue")
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


def run(spec: RunSpec, arguments: argparse.Namespace, control: Control) -> dict[str, Any] | None:
    # torch and accelerate take seconds to import: a wrong specification is reported before.
    from accel_parallel.train.session import Options, run_session

    options = Options(
        run=arguments.run,
        fresh=arguments.fresh,
        force_cpu=arguments.cpu,
        keep_precision=arguments.keep_precision,
        stop_at=arguments.stop_at,
    )
    control.install()
    try:
        return run_session(spec, options, control)
    finally:
        control.restore()


if __name__ == "__main__":
    end_process(main())
