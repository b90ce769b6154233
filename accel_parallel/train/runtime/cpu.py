"""Running the launch really sharded on CPU processes, in the project's loop or in any script.

Accelerate honours FSDP only on accelerators: on a machine without one it would train independent copies. What is
done differently is in the table of `substitutions`; a function here is one of its rows, or keeps torch from failing.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    ShardingStrategy,
    _optim_utils,
)
from torch.distributed.fsdp._flat_param import FlatParamHandle

from accel_parallel.asked import Asked, Parallelism
from accel_parallel.errors import LaunchError
from accel_parallel.substitutions import Substitution, of_plugin

Tell = Callable[[Substitution], None]

_NEVER_FREED: list[Any] = []
_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
# One process of a launch that asks for several devices has the second type.
_ON_CPU = (DistributedType.MULTI_CPU, DistributedType.NO)


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


def make_fsdp_work(asked: Asked, tell: Tell) -> None:
    """Let Accelerate and torch build FSDP on this CPU process; call once the process group exists."""
    if not asked.fsdp:
        return
    promote_to_fsdp()
    _promote_what_comes()
    adapt_plugins(tell)
    adapt_version1(asked)


def meet_plugin_of_script(asked: Asked, allowed: bool, tell: Tell) -> None:
    """For a launch that does not ask for FSDP: make a plugin that the script passes work, if that is `allowed`.

    On accelerators Accelerate would shard. On CPUs it ignores the plugin and trains replicas, silently
    (AcceleratorState.__init__, accelerate/state.py, 1.15): where it is not allowed, `Accelerator` raises LaunchError.
    """
    if asked.parallelism is not Parallelism.DDP:
        return
    if allowed:
        adapt_plugins(tell)
    original = AcceleratorState.__init__

    @functools.wraps(original)
    def init(state: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("fsdp_plugin") is not None and PartialState().distributed_type in _ON_CPU:
            if not allowed:
                raise LaunchError(
                    "the script passes a FullyShardedDataParallelPlugin, but the launch does not ask for FSDP: on CPU "
                    "its model would be replicated",
                    hint="pass --fsdp-in-script, or set distributed_type: FSDP in the accelerate file",
                )
            # A plugin of a second Accelerator has no effect, here or on accelerators.
            if AcceleratorState._shared_state == {}:
                promote_to_fsdp()
                adapt_version1(asked)
        original(state, *args, **kwargs)

    AcceleratorState.__init__ = init


def keep_process_groups() -> None:
    """Let no process group be freed that a script destroys; why is said at `_NEVER_FREED` in `process.py`.

    Of a model under DDP the last reference is often the script's own, which goes when the script has ended.
    """
    original = distributed_c10d.destroy_process_group

    @functools.wraps(original)
    def destroy(group: Any = None) -> None:
        _NEVER_FREED.extend(distributed_c10d._world.pg_map)
        original(group)

    torch.distributed.destroy_process_group = distributed_c10d.destroy_process_group = destroy


def promote_to_fsdp() -> None:
    """Let the CPU process state pass for an accelerator's, so that Accelerate applies its FSDP plugin.

    AcceleratorState promotes only accelerator types to FSDP (accelerate/state.py, 1.15). The private attribute is
    pinned by a test; verified on accelerate 1.15.
    """
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def _promote_what_comes() -> None:
    """The same for a process state that takes its place: transformers' TrainingArguments reset it."""
    original = PartialState.__init__

    @functools.wraps(original)
    def init(state: PartialState, *args: Any, **kwargs: Any) -> None:
        original(state, *args, **kwargs)
        if state.distributed_type in _ON_CPU:
            promote_to_fsdp()

    PartialState.__init__ = init


def adapt_plugins(tell: Tell) -> None:
    """Every plugin from now on, a script's own too, can be built without a device; `tell` hears what a script lost.

    Version 2 offloads without pinned memory. Version 1 does not offload, and fills no weights from the first process.
    """
    original = FullyShardedDataParallelPlugin.__post_init__

    @functools.wraps(original)
    def post_init(plugin: FullyShardedDataParallelPlugin) -> None:
        version = plugin.fsdp_version or int(os.environ.get("FSDP_VERSION", "1"))
        offloads = plugin.cpu_offload
        for key in ("sync_module_states", "cpu_ram_efficient_loading") if version == 1 else ():
            given = getattr(plugin, key)
            if given or (given is None and os.environ.get(f"FSDP_{key.upper()}", "false").lower() == "true"):
                tell(of_plugin(f"fsdp_{key}", version))
            setattr(plugin, key, False)
        original(plugin)
        # The policy that does not offload is an object too, and true.
        if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
            plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
        elif isinstance(plugin.cpu_offload, CPUOffload):
            offloads = offloads and plugin.cpu_offload.offload_params
            plugin.cpu_offload = CPUOffload(offload_params=False)
        else:
            offloads = False
        if offloads:
            tell(of_plugin("fsdp_offload_params", version))

    FullyShardedDataParallelPlugin.__post_init__ = post_init


def adapt_version1(asked: Asked) -> None:
    """Let version 1, whoever asks for it, collect whole states, and give its hybrid sharding the launch's machines.

    Left alone, hybrid sharding takes the CPU for the only device of a machine, shards over one process and averages no
    gradients (torch 2.13).
    """
    FlatParamHandle.to_cpu = _stay  # type: ignore[method-assign,assignment]
    _optim_utils._unflatten_orig_param_states = _copying(_optim_utils._unflatten_orig_param_states)
    original = FullyShardedDataParallel.__init__

    @functools.cache
    def machines() -> DeviceMesh:  # collective, as building a model is
        shape = (asked.num_machines, asked.local_world_size)
        return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))

    if asked.fsdp and asked.sharding_strategy.startswith("HYBRID"):
        machines()  # now: a model may be built of fake tensors, and a mesh may not

    @functools.wraps(original)
    def init(self: FullyShardedDataParallel, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        hybrid = kwargs.get("sharding_strategy") in _HYBRID
        if hybrid and not args and kwargs.get("process_group") is None and kwargs.get("device_mesh") is None:
            kwargs["device_mesh"] = machines()
        original(self, module, *args, **kwargs)

    FullyShardedDataParallel.__init__ = init  # type: ignore[method-assign]


def _copying(original: Callable[..., None]) -> Callable[..., None]:
    """A full state of the optimizer is moved to the CPU out of one buffer for all moments: there already, it is none.

    Left alone, every moment is saved as a view of the last one (`_allgather_orig_param_states`, torch 2.13).
    """

    @functools.wraps(original)
    def unflatten(
        info: Any, states: dict[str, dict[str, Any]], name: str, shard_state: bool, to_save: bool, cpu_offload: bool
    ) -> None:
        original(info, states, name, shard_state, to_save, cpu_offload)
        for state in states.values() if to_save and cpu_offload and not shard_state else ():
            state[name] = state[name].clone()

    return unflatten


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
