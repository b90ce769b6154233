"""Launching a strategy: what would run, and running it under supervision.

`plan_launch` is pure; `supervise` starts Accelerate's launcher as a child and turns every end of it into one message
and one exit code.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from accel_parallel.errors import LaunchError, Problem
from accel_parallel.spec import RunSpec


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Arguments of `accelerate launch`, up to and including the worker's own."""

    config: Path
    launcher_arguments: tuple[str, ...]
    worker_arguments: tuple[str, ...]
    note: str | None = None

    @property
    def arguments(self) -> list[str]:
        return [
            "--config_file", str(self.config), *self.launcher_arguments,
            "-m", "accel_parallel.train", *self.worker_arguments,
        ]  # fmt: skip

    def command(self) -> str:
        """The same launch without us, to paste into a shell."""
        return shlex.join(["accelerate", "launch", *self.arguments])


def check_machines(spec: RunSpec, machine_rank: int | None, run: Path | None) -> None:
    """Raises LaunchError when several machines lack what lets them meet: an address, a number, one run directory."""
    machines = spec.distributed.num_machines
    if machines == 1:
        return
    if spec.distributed.main_process_ip is None:
        raise LaunchError(f"{machines} machines need the address of machine 0", hint="set distributed.main_process_ip")
    if machine_rank is None:
        raise LaunchError(f"{machines} machines: which one is this?", hint="pass --machine-rank 0, 1, ...")
    if not 0 <= machine_rank < machines:
        raise LaunchError(f"--machine-rank {machine_rank} is not one of 0 to {machines - 1}")
    if run is None:
        raise LaunchError(f"{machines} machines have to share one run directory", hint="name it with --run on each")


def plan_launch(spec: RunSpec, run: Path, worker_arguments: Sequence[str], *, machine_rank: int | None) -> LaunchPlan:
    """How to start `spec`, of which `check_machines` approved, in `run` with its `accelerate.yaml` and `spec.yaml`."""
    worker = ("--spec", str(run / "spec.yaml"), "--run", str(run), *worker_arguments)
    config = run / "accelerate.yaml"
    if spec.distributed.num_machines > 1:
        return LaunchPlan(config, ("--machine_rank", str(machine_rank)), worker)
    if spec.num_processes == 1:
        return LaunchPlan(config, (), worker)
    # Nobody named one, and Accelerate's 29500 may be taken by the time it is used: any free one does.
    wanted = spec.distributed.main_process_port
    port = wanted if wanted is not None and _is_free(wanted) else _free_port()
    note = f"port {wanted} is in use: port {port} is used instead" if wanted not in (None, port) else None
    return LaunchPlan(config, ("--main_process_port", str(port)), worker, note)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a supervised launch ended."""

    exit_code: int
    summary: dict[str, Any] | None
    problems: list[Problem]
    traceback: str | None = None


# What launchers export to workers. Left over in a shell, it would decide instead of the YAML.
_TRACES = re.compile(
    r"(FSDP|PARALLELISM_CONFIG|TORCHELASTIC|ACCELERATE_USE|ACCELERATE_DYNAMO)_.*|ACCELERATE_MIXED_PRECISION"
    r"|(LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
)


def launcher_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The shell's environment without the traces of other launches."""
    return {key: value for key, value in env.items() if not _TRACES.fullmatch(key)}


def supervise(plan: LaunchPlan) -> Ended:
    """Run it to its end. SIGTERM, SIGUSR1, SIGHUP and Ctrl-C stop training in order, a second Ctrl-C at once."""
    with tempfile.TemporaryDirectory(prefix="accel-parallel-") as name, _Signals(Path(name) / "stop") as signals:
        status = Path(name)
        command = [sys.executable, "-m", "accel_parallel.train.agent", name, *plan.arguments, "--status-dir", name]
        # A session of its own: the terminal's Ctrl-C reaches this process only, which passes it on as a request.
        child = subprocess.Popen(command, start_new_session=True, env=launcher_environment(os.environ))
        while child.poll() is None and not signals.at_once:
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=0.2)
        if child.poll() is None:
            _end_group(child)
        return _ended(status, child.wait(), signals)


class _Signals:
    """Turns signals of this process into a request to stop, and a second Ctrl-C into the end."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag
        self._previous: dict[int, Any] = {}
        self.interrupted = False
        self.at_once = False

    def __enter__(self) -> "_Signals":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.interrupted:
            self.at_once = True
            return
        self.interrupted = self.interrupted or number == signal.SIGINT
        self._flag.touch()
        text = "stopping at the next report, with a checkpoint"
        again = "; Ctrl-C again ends at once" if number == signal.SIGINT else ""
        with suppress(OSError):
            os.write(2, f"\n{text}{again}\n".encode())


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End the launcher, which ends its workers; when it is killed they end by themselves (agent.die_with_parent)."""
    for number, seconds in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 10.0)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=seconds)
            return


def _ended(status: Path, returncode: int, signals: _Signals) -> Ended:
    summary = _read(status / "summary.json")
    agent = _read(status / "agent.json") or {}
    if signals.at_once:
        return Ended(130, None, [Problem("ended at once; earlier checkpoints are as they were", code="interrupted")])
    if returncode == 0 and agent.get("ok"):
        # On several machines only the first has a summary.
        return Ended(130 if signals.interrupted else 0, summary, [])
    errors = [error for path in status.glob("error-*.json") if (error := _read(path))]
    killed = [f for f in agent.get("failures", []) if f["exit_code"] < 0 and f["exit_code"] != -signal.SIGTERM]
    said = [error for error in errors if error["traceback"] is None]
    # A worker that says what is wrong knows best; then one that could not say anything any more; a worker that
    # crashed may only have missed the others.
    if said or (errors and not killed):
        first = min(said or errors, key=lambda error: error["time"])
        problems = [Problem(**problem) for problem in first["problems"]]
        return Ended(first["exit_code"], summary, problems, first["traceback"])
    problems = [Problem(_worker_end(failure), code="worker") for failure in (killed or agent.get("failures", []))[:1]]
    if not problems:
        end = f"was killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"exit code {returncode}"
        message = agent.get("message") or f"the launcher ended without a result: {end}"
        problems = [Problem(message, code="launcher")]
    return Ended(1, summary, problems)


def _worker_end(failure: dict[str, int]) -> str:
    code = failure["exit_code"]
    if code < 0:
        name = signal.Signals(-code).name
        why = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"rank {failure['rank']} was killed by {name}{why}"
    return f"rank {failure['rank']} ended with exit code {code} without saying why"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", port)) != 0


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
