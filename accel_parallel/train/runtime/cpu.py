"""Running the launch really sharded on CPU processes, in the project's loop or in any script.

Accelerate honours FSDP only on accelerators: on a machine without one it would train independent copies. What is
done differently is in the table of `substitutions`; a function here is one of its rows, or keeps torch from failing.
"""

import contextlib
import functools
import os
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParamHandle

from accel_parallel.asked import Asked, Parallelism


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


def make_fsdp_work(asked: Asked) -> None:
    """Collective. Let Accelerate and torch build FSDP on this CPU process; call once the process group exists."""
    if not asked.fsdp:
        return
    promote_to_fsdp()
    offload_without_a_device()
    if asked.parallelism is Parallelism.FSDP1:
        FlatParamHandle.to_cpu = _stay  # type: ignore[method-assign,assignment]
        if asked.sharding_strategy.startswith("HYBRID_SHARD"):
            shard_inside_machines(asked)


def promote_to_fsdp() -> None:
    """Let the CPU process state pass for an accelerator's, so that Accelerate applies its FSDP plugin.

    AcceleratorState promotes only accelerator types to FSDP (accelerate/state.py, 1.15). The private attribute is
    pinned by a test; verified on accelerate 1.15.
    """
    from accelerate import PartialState

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def offload_without_a_device() -> None:
    """Every plugin from now on, a script's own too, offloads without pinned memory (version 2) or not at all (1)."""
    original = FullyShardedDataParallelPlugin.__post_init__

    @functools.wraps(original)
    def post_init(plugin: FullyShardedDataParallelPlugin) -> None:
        original(plugin)
        # The policy that does not offload is an object too, and true.
        if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
            plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
        elif isinstance(plugin.cpu_offload, CPUOffload):
            plugin.cpu_offload = CPUOffload(offload_params=False)

    FullyShardedDataParallelPlugin.__post_init__ = post_init


def shard_inside_machines(asked: Asked) -> None:
    """Collective. Give version 1's hybrid sharding the machines of the launch.

    Left alone, it takes the CPU for the only device of a machine, shards over one process and averages no gradients
    (torch 2.13).
    """
    mesh = init_device_mesh("cpu", (asked.num_machines, asked.local_world_size), mesh_dim_names=("replicate", "shard"))
    original = FullyShardedDataParallel.__init__

    @functools.wraps(original)
    def init(self: FullyShardedDataParallel, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if not args and kwargs.get("process_group") is None and kwargs.get("device_mesh") is None:
            kwargs["device_mesh"] = mesh
        original(self, module, *args, **kwargs)

    FullyShardedDataParallel.__init__ = init  # type: ignore[method-assign]


@contextlib.contextmanager
def _stay(handle: FlatParamHandle) -> Iterator[None]:
    """Where everything is on the CPU, version 1's move there for a full state dict frees what it then reads."""
    yield


def use_all_cores(local_world_size: int, env: MutableMapping[str, str] = os.environ) -> None:
    """Share this machine's cores between its processes.

    Accelerate's launcher exports OMP_NUM_THREADS=1 when nobody set it; a larger number is somebody's wish.
    """
    if env.get("OMP_NUM_THREADS", "1").strip() not in ("", "0", "1"):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // local_world_size))
