"""Joining the other processes of a launch, on accelerators or on CPUs, before anything of Accelerate exists."""

import os
import warnings
from typing import Any

import torch
from accelerate import PartialState

from accel_parallel.asked import PROMISED_PROCESSES, Asked
from accel_parallel.errors import LaunchError, MismatchError
from accel_parallel.substitutions import Substitution, substitutions
from accel_parallel.train.runtime import cpu
from accel_parallel.train.runtime.check import world_mismatch


def enter(asked: Asked, *, backend: str = "auto", force_cpu: bool, keep_precision: bool) -> list[Substitution] | None:
    """Make this process ready for the launch; the substitutions if it runs on CPUs, else None.

    Raises LaunchError with fewer accelerators than processes, MismatchError with fewer processes than were promised
    or with a wish that Accelerate will not read.
    """
    promised = os.environ.get(PROMISED_PROCESSES, "")
    if promised.isdigit() and int(promised) != asked.world_size:
        raise MismatchError(world_mismatch(int(promised), asked.world_size), hint=f"or unset {PROMISED_PROCESSES}")
    if asked.contradiction:
        raise MismatchError(f"what runs is not what was asked for: {asked.contradiction}")
    if force_cpu or accelerators() == 0:
        changed = substitutions(asked, backend, keep_precision)
        cpu.prepare_environment(asked, keep_precision)
        cpu.use_all_cores(asked.local_world_size)
        return changed
    if asked.local_world_size > accelerators():
        raise LaunchError(
            f"{asked.local_world_size} processes on this machine, accelerators: {accelerators()}",
            hint="lower distributed.processes_per_machine (or --num-processes), or run on CPU with --cpu",
        )
    return None


def join(asked: Asked, on_cpu: bool, options: dict[str, Any], tell: cpu.Tell = lambda _: None) -> None:
    """Collective. Create Accelerate's process state, and with it the process group, told `options`.

    `tell` hears what a plugin asks for later, in a script, and gets differently on CPUs.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="OMP_NUM_THREADS/MKL_NUM_THREADS unset")
        PartialState(cpu=on_cpu, **options)
    if on_cpu:
        cpu.make_fsdp_work(asked, tell)


def accelerators() -> int:
    """Accelerators of this machine that can be trained on; Apple's has no float64 and no collectives."""
    current = torch.accelerator.current_accelerator()
    return 0 if current is None or current.type == "mps" else torch.accelerator.device_count()
