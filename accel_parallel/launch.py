"""Launching: what would run, as arguments and environment. Pure; `supervise` runs it."""

import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accel_parallel.asked import PROMISED_PROCESSES
from accel_parallel.errors import LaunchError
from accel_parallel.spec import RunSpec

LOOP = "accel_parallel.train"
SCRIPT = "accel_parallel.train.script"


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Arguments of `accelerate launch`, up to and including the worker's own. `module` is what each process runs."""

    config: Path
    launcher_arguments: tuple[str, ...]
    module: str
    worker_arguments: tuple[str, ...]
    num_processes: int
    note: str | None = None

    def arguments(self, *reporting: str) -> list[str]:
        """All of them; `reporting` is added to the worker's, before its own."""
        return [
            "--config_file", str(self.config), *self.launcher_arguments,
            "-m", self.module, *reporting, *self.worker_arguments,
        ]  # fmt: skip

    def command(self) -> str:
        """The same launch without us, to paste into a shell."""
        return shlex.join(["accelerate", "launch", *self.arguments()])


def check_machines(spec: RunSpec, machine_rank: int | None) -> None:
    """Raises LaunchError when several machines lack what lets them meet: an address and a number."""
    machines = spec.distributed.num_machines
    if machines == 1 and machine_rank in (None, 0):
        return
    if machines == 1:
        message = f"--machine-rank {machine_rank}: this launch has one machine"
        raise LaunchError(message, hint="distributed.num_machines")
    if spec.distributed.main_process_ip is None:
        hint = "distributed.main_process_ip, or main_process_ip in a file of yours"
        raise LaunchError(f"{machines} machines need the address of machine 0", hint=hint)
    if machine_rank is None:
        raise LaunchError(f"{machines} machines: which one is this?", hint="pass --machine-rank 0, 1, ...")
    if not 0 <= machine_rank < machines:
        raise LaunchError(f"--machine-rank {machine_rank} is not one of 0 to {machines - 1}")


def plan_launch(
    spec: RunSpec,
    config: Path,
    worker_arguments: Sequence[str],
    *,
    module: str = LOOP,
    launcher_arguments: Sequence[str] = (),
    machine_rank: int | None = None,
) -> LaunchPlan:
    """How to start `spec`, of which `check_machines` approved, from the accelerate file `config`."""
    given, note = tuple(launcher_arguments), None
    if spec.distributed.num_machines > 1:
        given = (*given, "--machine_rank", str(machine_rank))
    elif spec.num_processes > 1:
        # Nobody named one, and Accelerate's 29500 may be taken by the time it is used: any free one does.
        wanted = spec.distributed.main_process_port
        port = wanted if wanted is not None and _is_free(wanted) else _free_port()
        note = f"port {wanted} is in use: port {port} is used instead" if wanted not in (None, port) else None
        given = (*given, "--main_process_port", str(port))
    return LaunchPlan(config, given, module, tuple(worker_arguments), spec.num_processes, note)


# What launchers export to workers. Left over in a shell, it would decide instead of the YAML.
_TRACES = re.compile(
    r"(FSDP|PARALLELISM_CONFIG|TORCHELASTIC|ACCELERATE_USE|ACCELERATE_DYNAMO)_\w*|ACCELERATE_MIXED_PRECISION"
    r"|(LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
    rf"|{PROMISED_PROCESSES}",
    re.ASCII,
)


def without_traces(env: Mapping[str, str]) -> dict[str, str]:
    """The shell's environment without what other launches left in it."""
    return {key: value for key, value in env.items() if not _TRACES.fullmatch(key)}


def launcher_environment(env: Mapping[str, str], num_processes: int) -> dict[str, str]:
    """The same, with what this launch promises."""
    return {**without_traces(env), PROMISED_PROCESSES: str(num_processes)}


def shell_environment(exported: Mapping[str, str], env: Mapping[str, str], num_processes: int) -> list[str]:
    """Lines for a shell that is to start torchrun: what Accelerate's launcher would export, and nothing left over."""
    wanted = {**exported, PROMISED_PROCESSES: str(num_processes)}
    unset = [f"unset {key}" for key in sorted(env) if _TRACES.fullmatch(key) and key not in wanted]
    return [*unset, *(f"export {key}={shlex.quote(value)}" for key, value in wanted.items())]


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", port)) != 0


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
