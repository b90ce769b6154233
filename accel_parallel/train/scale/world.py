"""The world of which one process exists, and the runtime that lives in it.

torch's `fake` process group (torch/testing/_internal/distributed/fake_pg.py) has a rank and a size; its collectives
return at once and move nothing. Seen on torch 2.13, accelerate 1.15.
"""

import os
from collections.abc import MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.fsdp import _flat_param
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from accel_parallel.asked import PROMISED_PROCESSES, Parallelism
from accel_parallel.errors import LaunchError
from accel_parallel.train.runtime import Runtime
from accel_parallel.train.scale.buckets import average, gradient_order, reducer_without_others

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """Which process of how many this one is to be."""

    world_size: int
    local_world_size: int
    rank: int = 0

    def __post_init__(self) -> None:
        """Raises LaunchError if there is no such process, or no such world."""
        if self.world_size < 2:
            raise LaunchError(
                f"a world of {self.world_size} processes has no collectives", hint="--world-size 2 or more"
            )
        if self.world_size % self.local_world_size:
            raise LaunchError(
                f"{self.world_size} processes do not fill machines of {self.local_world_size}",
                hint="choose a --local-world-size that divides --world-size",
            )
        if self.rank >= self.world_size:
            raise LaunchError(f"--rank {self.rank} is not one of 0 to {self.world_size - 1}")

    def enter(self, env: MutableMapping[str, str] = os.environ) -> None:
        """Make this process that one. What the launcher exported for the strategy stays, but for the numbers.

        Raises LaunchError if the parallelism_config of the accelerate YAML is of another world.
        """
        mesh = [int(env.get(f"PARALLELISM_CONFIG_DP_{name}_SIZE", "1")) for name in ("REPLICATE", "SHARD")]
        if mesh[0] > 1 and mesh[0] * mesh[1] != self.world_size:
            raise LaunchError(
                f"parallelism_config spans {mesh[0]} x {mesh[1]} processes, the simulated world has {self.world_size}",
                hint="write the accelerate YAML for a specification of that many processes",
            )
        env.update(
            RANK=str(self.rank),
            LOCAL_RANK=str(self.rank % self.local_world_size),
            WORLD_SIZE=str(self.world_size),
            LOCAL_WORLD_SIZE=str(self.local_world_size),
            MASTER_ADDR="localhost",
            MASTER_PORT="1",
        )
        # Nobody counts on the processes that are not there, and they have no weights to receive or to send.
        env.pop(PROMISED_PROCESSES, None)
        env["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
        distributed.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=self.world_size)


class SimulatedRuntime(Runtime):
    """The only process of its world: it asks nobody, and prepares models of fake tensors."""

    def open_side_groups(self) -> None:
        """None: gloo would wait for the others."""

    def gather_objects(self, value: T) -> list[T]:
        return [value]

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        self.accelerator.device_placement = False  # everything is there, and fake tensors cannot be swapped
        if self.asked.parallelism is not Parallelism.DDP:
            tell_storages_apart(model)
            return super().prepare(model, optimizer, tokens, labels)
        with self.accelerator.autocast():
            order = gradient_order(model, tokens, labels)
        with reducer_without_others(order):
            return super().prepare(model, optimizer, tokens, labels)

    def spread(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        # Version 2 makes a mesh for each unit and reads its ranks, which are a tensor too.
        version2 = self.asked.parallelism is Parallelism.FSDP2
        real: AbstractContextManager[Any] = unset_fake_temporarily() if version2 else nullcontext()
        with real:
            model, optimizer = super().spread(model, optimizer)
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(model.process_group, average)
        return model, optimizer


def tell_storages_apart(model: nn.Module) -> None:
    """Fake tensors all have address 0, by which Accelerate finds parameters again (version 2) and version 1 storages.

    accelerator.py, `_prepare_fsdp2` (1.15); torch/distributed/fsdp/_flat_param.py, `_same_storage` and
    `_data_ptr_allocated` (2.13). Storages of fake tensors do have identity and size, and these decide instead.
    """
    for number, parameter in enumerate(model.parameters(), start=1):
        parameter.data_ptr = partial(int, number)  # type: ignore[method-assign]
    _flat_param._same_storage = lambda a, b: a.untyped_storage()._cdata == b.untyped_storage()._cdata
    version1: Any = _flat_param
    version1._data_ptr_allocated = lambda tensor: tensor.untyped_storage().size() > 0
