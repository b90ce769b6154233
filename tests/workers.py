"""Training in real worker processes of a pool, so that a test costs no start of Python and no import of torch.

Every worker has the environment that Accelerate's launcher would give it, and runs the same entry point as its,
`accel_parallel.train.__main__.main`.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_parallel.accelerate_yaml import render_file
from accel_parallel.metrics import by_step, read_lines
from accel_parallel.spec import dump_spec, read_spec
from accel_parallel.strategies import STRATEGIES
from accel_parallel.train.pool import Answer, Job, start_job
from tests import sabotage

TIMEOUT = 180
SETUP = (
    "ACCELERATE_",
    "FSDP_",
    "PARALLELISM_CONFIG_",
    "MASTER_",
    "OMP_",
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "TORCHELASTIC",
)


def launcher_environment(config: str) -> dict[str, str]:
    """What Accelerate's own launcher exports for this YAML text."""
    from unittest.mock import patch

    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file, patch.dict(os.environ):
        for key in [key for key in os.environ if key.startswith(SETUP)]:
            del os.environ[key]
        before = dict(os.environ)
        file.write(config)
        file.flush()
        with patch("accelerate.utils.launch.is_port_in_use", return_value=False):
            args = launch_command_parser().parse_args(["--config_file", file.name, "train.py"])
            args, _, _ = _validate_launch_command(args)
            many = args.multi_gpu or args.use_fsdp
            environment = prepare_multi_gpu_env(args) if many else prepare_simple_launcher_cmd_env(args)[1]
    return {key: value for key, value in environment.items() if before.get(key) != value}


def run_processes(
    function: Callable[..., Any], environment: dict[str, str], world_size: int, *args: Any, machines: int = 1
) -> list[Answer]:
    """Call `function(*args)` in `world_size` processes of one job; ("ok", result) or ("error", traceback) per rank."""
    return start_processes(function, environment, world_size, *args, machines=machines).results(TIMEOUT)


def start_processes(
    function: Callable[..., Any], environment: dict[str, str], world_size: int, *args: Any, machines: int = 1
) -> Job:
    """Begin to call `function(*args)` in `world_size` processes of one job."""
    outside = {key: value for key, value in os.environ.items() if not key.startswith(SETUP)}
    return start_job(function, {**outside, **environment}, world_size, args, machines=machines)


def _worker(argv: list[str], status: str) -> int:
    import torch

    from accel_parallel.train.__main__ import main
    from accel_parallel.train.runtime import cpu

    # Models this small gain nothing from a second thread, and lose much when another test runs beside them.
    cpu.use_all_cores = lambda *_: torch.set_num_threads(1)
    if "ACCELERATE_TEST_SABOTAGE" in os.environ:
        sabotage.apply(os.environ["ACCELERATE_TEST_SABOTAGE"])
    with (Path(status) / f"log-{os.environ.get('RANK', '0')}.txt").open("w") as log:
        sys.stdout = sys.stderr = log
        return main([*argv, "--status-dir", status])


@dataclass(frozen=True)
class Trained:
    """How a job of workers ended."""

    run: Path
    exit_codes: list[int]
    errors: list[dict[str, Any]]
    summary: dict[str, Any] | None
    log: str

    def rows(self, kind: str = "train") -> dict[int, dict[str, Any]]:
        return {step: dict(row) for step, row in by_step(read_lines(self.run / "metrics.jsonl"), kind).items()}

    def column(self, key: str, kind: str = "train") -> list[float]:
        return [row[key] for row in self.rows(kind).values()]

    @property
    def environment(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.run / "environment.json").read_text())
        return content

    @property
    def message(self) -> str:
        """The problems of the lowest failing rank."""
        return "\n".join(problem["message"] + str(problem["hint"]) for problem in self.errors[0]["problems"])


def train(
    run: Path,
    strategy: str,
    world_size: int,
    sets: Sequence[str] = (),
    *,
    argv: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Trained:
    """Train a specification under a strategy, as `accel-parallel launch` would, in forked workers."""
    with tempfile.TemporaryDirectory() as status:
        job = start_training(run, strategy, world_size, sets, Path(status), argv=argv, environment=environment)
        results = job.results(TIMEOUT)
        crashes = [text for kind, text in results if kind == "error"]
        if crashes:
            raise AssertionError("\n".join(crashes))
        errors = [json.loads(path.read_text()) for path in sorted(Path(status).glob("error-*.json"))]
        summary = Path(status) / "summary.json"
        return Trained(
            run,
            [code for _, code in results],
            errors,
            json.loads(summary.read_text()) if summary.exists() else None,
            log_of(Path(status)),
        )


def start_training(
    run: Path,
    strategy: str,
    world_size: int,
    sets: Sequence[str],
    status: Path,
    *,
    argv: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Job:
    """Begin to `train`; `status` is an empty directory for what the workers tell."""
    per_machine = world_size // STRATEGIES[strategy].min_machines
    spec = STRATEGIES[strategy].resolve(read_spec(None, [f"distributed.processes_per_machine={per_machine}", *sets]))
    assert spec.num_processes == world_size, f"{strategy} cannot have {world_size} processes"
    exported = {**launcher_environment(render_file(spec, STRATEGIES[strategy])), **(environment or {})}
    spec_file = status / "spec.yaml"
    spec_file.write_text(dump_spec(spec))
    arguments = ["--spec", str(spec_file), "--run", str(run), *argv]
    machines = spec.distributed.num_machines
    return start_processes(_worker, exported, world_size, arguments, str(status), machines=machines)


def log_of(status: Path) -> str:
    """What the workers have said so far, rank by rank."""
    return "".join(path.read_text() for path in sorted(status.glob("log-*.txt")))
