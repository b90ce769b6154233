"""Real worker processes without the seconds that starting Python and importing torch cost.

A fork server imports torch once; every worker is forked from it with the environment that Accelerate's launcher would
give it, and runs the same entry point, `accel_parallel.train.__main__.main`.
"""

import json
import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from accel_parallel.accelerate_yaml import render_file
from accel_parallel.metrics import by_step, read_lines
from accel_parallel.spec import dump_spec, read_spec
from accel_parallel.strategies import STRATEGIES
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


@cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


@dataclass(frozen=True)
class Job:
    """Processes that were started and are not waited for, in rank order."""

    processes: list[Any]
    receivers: list[Connection]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def results(self) -> list[tuple[str, Any]]:
        """Wait; ("ok", result) or ("error", traceback) per rank."""
        results = []
        for process, receiver in zip(self.processes, self.receivers, strict=True):
            try:
                results.append(receiver.recv() if receiver.poll(TIMEOUT) else ("error", f"no answer in {TIMEOUT} s"))
            except EOFError:
                process.join()
                results.append(("error", f"process ended with exit code {process.exitcode}"))
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        return results


def run_processes(
    function: Callable[..., Any], environment: dict[str, str], world_size: int, *args: Any, machines: int = 1
) -> list[tuple[str, Any]]:
    """Call `function(*args)` in `world_size` processes of one job; ("ok", result) or ("error", traceback) per rank."""
    return start_processes(function, environment, world_size, *args, machines=machines).results()


def start_processes(
    function: Callable[..., Any], environment: dict[str, str], world_size: int, *args: Any, machines: int = 1
) -> Job:
    """Begin to call `function(*args)` in `world_size` processes of one job."""
    port = free_port()
    job = Job([], [])
    local_size = world_size // machines
    for rank in range(world_size):
        world = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % local_size),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(local_size),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
        receiver, sender = _context().Pipe(duplex=False)
        process_environment = {**environment, **(world if world_size > 1 else {})}
        process = _context().Process(target=_run, args=(sender, process_environment, function, args), daemon=True)
        process.start()
        sender.close()
        job.processes.append(process)
        job.receivers.append(receiver)
    return job


def _run(sender: Connection, environment: dict[str, str], function: Callable[..., Any], args: Sequence[Any]) -> None:
    for key in [key for key in os.environ if key.startswith(SETUP)]:
        del os.environ[key]
    os.environ.update(environment)
    try:
        sender.send(("ok", function(*args)))
    except BaseException:
        sender.send(("error", traceback.format_exc()))


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
        results = job.results()
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])
