"""DDP's reducer in a process whose others do not exist.

It is written in C++ and talks by itself: it compares parameters with the others, and after the first backward pass
agrees with them on new buckets. Both read numbers out of tensors, which fake ones do not have. Seen on torch 2.13.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn import parallel

# Private functions of both are replaced here, of which torch's annotations know nothing.
c10d: Any = distributed
ddp: Any = parallel.distributed
_DEFAULT_CAP_MIB = 25


def gradient_order(model: nn.Module, tokens: Tensor, labels: Tensor) -> list[int]:
    """Numbers of the parameters in the order in which their gradients are ready; takes a pass that is thrown away."""
    order: list[int] = []
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, number=number: order.append(number))
        for number, parameter in enumerate(model.parameters())
    ]
    model(tokens, labels).backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    return order


@contextmanager
def reducer_without_others(order: list[int]) -> Iterator[None]:
    """Inside, DDP makes the buckets at once that it would have after its first backward pass, and keeps them.

    The rule is that of `Reducer::rebuild_buckets` (torch/csrc/distributed/c10d/reducer.cpp): gradients fill buckets
    in the order in which they are ready; the first is smaller if nobody chose a size.
    """
    assign = c10d._compute_bucket_assignment_by_size
    helper = ddp.DistributedDataParallel._ddp_init_helper

    def init_helper(self: Any, parameters: list[Tensor], *rest: Any) -> None:
        cap = self.bucket_bytes_cap
        first = c10d._DEFAULT_FIRST_BUCKET_BYTES if cap == _DEFAULT_CAP_MIB * 2**20 else cap

        def in_order(tensors: list[Tensor], limits: list[int], sparse: list[bool]) -> tuple[list[list[int]], list[int]]:
            ready = [tensors[number] for number in order]
            buckets, sizes = assign(ready, [first, cap], [sparse[number] for number in order], order)
            return buckets[::-1], sizes[::-1]  # the caller turns them around

        c10d._compute_bucket_assignment_by_size = in_order
        try:
            helper(self, parameters, *rest)
        finally:
            c10d._compute_bucket_assignment_by_size = assign

    ddp.DistributedDataParallel._ddp_init_helper = init_helper
    ddp._verify_param_shape_across_processes = _nothing
    ddp._sync_module_states = _nothing
    c10d.Reducer._rebuild_buckets = lambda reducer: False
    try:
        yield
    finally:
        ddp.DistributedDataParallel._ddp_init_helper = helper


def average(group: distributed.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """What the reducer does without a hook.

    Left alone, it would look for the result in a Work, where the fake group leaves none.
    """
    tensor = bucket.buffer().div_(group.size())
    distributed.all_reduce(tensor, group=group)
    future: Future[Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
