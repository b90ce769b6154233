"""Running the launch really sharded on CPU processes, and saying what differs from the GPU run.

Accelerate honours FSDP only on accelerators: on a machine without one it would train independent copies.
A substitution is something a CPU cannot do and that does not change what is learned; it is reported, in one
line each, and never hides a mismatch.
"""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass

import torch
from accelerate.utils import DistributedType

from accel_parallel.train.runtime.asked import Asked, Parallelism


@dataclass(frozen=True, slots=True)
class Substitution:
    """`key` was asked to be `asked` and is `got` in this process, for this reason."""

    key: str
    asked: str
    got: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {self.asked} -> {self.got} ({self.reason})"

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def substitutions(
    asked: Asked, backend: str, keep_precision: bool, env: Mapping[str, str] = os.environ
) -> list[Substitution]:
    """Everything this launch gets differently because it runs on CPUs. Call before `prepare_environment`."""
    found = [Substitution("device", "accelerator", "cpu", "no accelerator is used")]
    if backend != "gloo" and asked.world_size > 1:
        found.append(Substitution("distributed.backend", "nccl", "gloo", "NCCL needs GPUs"))
    if asked.mixed_precision != "no" and not keep_precision:
        reason = "16-bit products are emulated on CPUs without bf16 units; --keep-precision keeps it"
        found.append(Substitution("mixed_precision", asked.mixed_precision, "no", reason))
    if asked.parallelism is Parallelism.FSDP1:
        reason = "version 1 needs a device for it; every process initialises the same weights instead"
        for key in ("fsdp_sync_module_states", "fsdp_cpu_ram_efficient_loading"):
            if env.get(key.upper(), "false").lower() == "true":
                found.append(Substitution(key, "true", "false", reason))
    if asked.cpu_offload and asked.parallelism is Parallelism.FSDP2:
        found.append(Substitution("fsdp_offload_params", "pinned", "unpinned", "pinned memory needs a device"))
    if asked.cpu_offload and asked.parallelism is Parallelism.FSDP1:
        reason = "version 1 offloads from a device; everything is in host memory anyway"
        found.append(Substitution("fsdp_offload_params", "true", "false", reason))
    return found


def prepare_environment(asked: Asked, keep_precision: bool, env: MutableMapping[str, str] = os.environ) -> None:
    """Environment that lets Accelerate run this launch on CPU; call before any of its state exists."""
    env["ACCELERATE_TORCH_DEVICE"] = "cpu"
    env["ACCELERATE_USE_CPU"] = "true"
    env["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    if asked.mixed_precision != "no" and not keep_precision:
        env["ACCELERATE_MIXED_PRECISION"] = "no"
    if asked.parallelism is Parallelism.FSDP1:
        env["FSDP_SYNC_MODULE_STATES"] = "false"
        env["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


def promote_to_fsdp() -> None:
    """Let the CPU process state pass for an accelerator's, so that Accelerate applies its FSDP plugin.

    AcceleratorState promotes only accelerator types to FSDP (accelerate/state.py, 1.15). The private attribute is
    pinned by a test; verified on accelerate 1.15.
    """
    from accelerate import PartialState

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def use_all_cores(local_world_size: int, env: MutableMapping[str, str] = os.environ) -> None:
    """Share this machine's cores between its processes.

    Accelerate's launcher exports OMP_NUM_THREADS=1 when nobody set it; a larger number is somebody's wish.
    """
    if env.get("OMP_NUM_THREADS", "1").strip() not in ("", "0", "1"):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // local_world_size))
