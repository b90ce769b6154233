"""The older sharded tensors of version 1, as the newer ones, which can be copied in the background."""

from typing import Any

import torch
from torch import distributed
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def with_dtensors(tree: Any) -> Any:
    """The same nested dictionaries and lists; every ShardedTensor is a DTensor of the same shards, nothing copied.

    The stager of torch 2.13 fails on a ShardedTensor (it asks for its `data_ptr`).
    """
    if isinstance(tree, dict):
        return {key: with_dtensors(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [with_dtensors(value) for value in tree]
    return _as_dtensor(tree) if isinstance(tree, ShardedTensor) else tree


def _as_dtensor(tensor: ShardedTensor) -> DTensor:
    """Raises AssertionError unless it is cut along its first dimension as `torch.chunk` does."""
    group = tensor._process_group or distributed.group.WORLD
    assert group is not None
    shape = tensor.metadata().size  # its `size()` warns the user
    shards = tensor.local_shards()
    local = shards[0].tensor if shards else torch.empty(0, *shape[1:], dtype=tensor.dtype)
    rows = -(-shape[0] // distributed.get_world_size(group))
    first = min(rows * distributed.get_rank(group), shape[0])
    assert len(shards) <= 1
    assert not shards or shards[0].metadata.shard_offsets == [first, *(0 for _ in shape[1:])], "cut in another way"
    assert local.shape == (min(rows, shape[0] - first), *shape[1:]), "cut in another way"
    mesh = DeviceMesh.from_group(group, local.device.type)
    return DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=shape, stride=torch.empty(shape, device="meta").stride()
    )
