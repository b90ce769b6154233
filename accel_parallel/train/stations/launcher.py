"""From a file to what Accelerate's launcher would start: commands/launch.py and utils/launch.py (1.15)."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed.run as torchrun
from accelerate.commands import launch as commands
from accelerate.utils import launch as preparation

from accel_parallel.errors import LaunchError
from accel_parallel.train.stations.pretend import in_one_line, only_environment, replaced, silence

NOT_SET = "not set"
_SCRIPT = "train.py"
# As it is where somebody has set it: otherwise the launcher divides the cores of this machine among the processes.
_THREADS = {"OMP_NUM_THREADS": "1"}
_ELSEWHERE: dict[str, Any] = {
    # What must not depend on this machine: its ports, its MPI, its libraries for fp8.
    "is_port_in_use": lambda port: False,
    "get_free_port": lambda: 0,
    "_get_mpirun_args": lambda: ("mpirun", "--hostfile", "-n", "--npernode", "--bind-to"),
    "is_fp8_available": lambda: True,
}


@dataclass(frozen=True, slots=True)
class Launch:
    """What is started on each machine."""

    command: dict[str, str]
    """Which launcher, and its options by name."""
    environment: dict[str, str]
    """What the launcher adds to its own environment."""
    processes: int
    """Over all machines."""
    ranked: bool
    """Whether each process is told its rank; those of the simple launcher are not."""

    @property
    def in_worker(self) -> dict[str, str]:
        """The environment of the first process."""
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(self.processes)} if self.ranked else {}
        return {**_THREADS, **self.environment, **ranks}


def processes_started(config: Path) -> int:
    """Over all machines, whatever `num_processes` says.

    Raises LaunchError where Accelerate refuses the file, or leaves the number to the machine.
    """
    return launched(config).processes


def launched(config: Path) -> Launch:
    """What `accelerate launch --config_file config train.py` would start on the first machine.

    Raises LaunchError where Accelerate refuses the file; TPUs and SageMaker have launchers that are not followed.
    """
    try:
        return launch(config)
    except LaunchError as error:
        raise LaunchError(f"{config}: {error.message}") from None
    except Exception as error:  # whatever Accelerate stumbles over, and it has no type of its own for it
        raise LaunchError(f"{config}: Accelerate's launcher refuses it: {in_one_line(error)}") from None


def launch(config: Path) -> Launch:
    """The same, with Accelerate's own errors."""
    found: list[Launch] = []

    def recorded(prepare: Callable[[Any], Launch]) -> Callable[..., None]:
        return lambda *args: found.append(prepare(args[-1]))

    with ExitStack() as stack:
        stack.enter_context(silence())
        stack.enter_context(only_environment(_THREADS))
        stack.enter_context(replaced(preparation, **_ELSEWHERE))
        launchers: dict[str, Callable[[Any], Launch]] = {
            "multi_gpu_launcher": _torchrun,
            "simple_launcher": _simple,
            "deepspeed_launcher": _deepspeed,
            "tpu_launcher": _not_followed,
            "tpu_pod_launcher": _not_followed,
            "sagemaker_launcher": _not_followed,
        }
        stack.enter_context(replaced(commands, **{name: recorded(prepare) for name, prepare in launchers.items()}))
        commands.launch_command(parser().parse_args(["--config_file", str(config.absolute()), _SCRIPT]))
    return found[0]


@cache
def parser() -> Any:
    """Of `accelerate launch`."""
    return commands.launch_command_parser()


@cache
def _torchrun_parser() -> Any:
    return torchrun.get_args_parser()


def _torchrun(args: Any) -> Launch:
    return _under_torchrun(args, preparation.prepare_multi_gpu_env(args))


def _under_torchrun(args: Any, environment: dict[str, str]) -> Launch:
    script = ["--training_script", args.training_script, "--training_script_args", args.training_script_args]
    options = vars(preparation._filter_args(args, _torchrun_parser(), script))
    command = {"launcher": "torchrun", **{f"--{name}": str(value) for name, value in options.items()}}
    # torchrun reads nnodes as LEAST:MOST; the default is 1:1.
    machines = int(str(options["nnodes"]).partition(":")[0])
    return Launch(command, _added(environment), _count(options["nproc_per_node"]) * machines, ranked=True)


def _simple(args: Any) -> Launch:
    words, environment = preparation.prepare_simple_launcher_cmd_env(args)
    command = {"launcher": "mpirun" if args.mpirun_hostfile else "simple", "command": " ".join(words)}
    if not args.mpirun_hostfile:
        return Launch(command, _added(environment), 1, ranked=False)
    return Launch(command, _added(environment), _count(args.num_processes or 1), ranked=True)


def _deepspeed(args: Any) -> Launch:
    words, environment = preparation.prepare_deepspeed_cmd_env(args)
    if words is None:
        return _under_torchrun(args, environment)
    processes = _count(args.num_processes) // args.num_machines * args.num_machines
    return Launch({"launcher": "deepspeed", "command": " ".join(words)}, _added(environment), processes, ranked=True)


def _not_followed(args: Any) -> Launch:
    raise LaunchError("the launchers for TPUs and for SageMaker are not followed here")


def _added(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if os.environ.get(name) != value}


def _count(value: Any) -> int:
    if not str(value).isdecimal():
        raise LaunchError(f"the number of processes is {value!r}, which the machine decides")
    return int(value)
