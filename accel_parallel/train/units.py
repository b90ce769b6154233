"""The FSDP units of a prepared model in this process: what each holds, and what it sends.

Reads private attributes of torch 2.13 (`_fully_shard/_fsdp_param_group.py`, `_flat_param.py`, `_runtime_utils.py`).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, _runtime_utils
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from accel_parallel.train.probe import Collectives
from accel_parallel.train.runtime.observe import clean_name, local


@dataclass(frozen=True, slots=True)
class HeldUnit:
    """One unit as this process holds it; the root's name is empty."""

    name: str
    parameters: tuple[str, ...]
    """Full names, sorted; of a tied parameter one."""
    held: int
    """Elements of this process's shard, padding included."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def held_units(model: nn.Module) -> list[HeldUnit]:
    """The units that hold parameters, in the order of the model's modules; empty without FSDP."""
    found = []
    names = _names(model)
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._has_params:
            handle = module._handle
            assert handle is not None
            parameters = [clean_name(f"{name}.{fqn}".strip(".")) for fqn in handle.flat_param._fqns]
            held = handle.flat_param._sharded_size.numel()
            found.append(HeldUnit(clean_name(name), tuple(sorted(parameters)), held))
        elif isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                places = [parameter._module_info for parameter in group.fsdp_params]
                parameters = [f"{names[id(place.module)]}.{place.param_name}".strip(".") for place in places]
                held = sum(local(parameter.sharded_param).numel() for parameter in group.fsdp_params)
                found.append(HeldUnit(clean_name(name), tuple(sorted(parameters)), held))
    return found


@contextmanager
def naming_units(model: nn.Module, collectives: Collectives) -> Iterator[None]:
    """Meanwhile, `collectives` learns for which unit of `model` each collective is."""
    names = _names(model)

    def named(function: Callable[..., Any], module_of: Callable[..., nn.Module]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            before, collectives.unit = collectives.unit, names.get(id(module_of(*args)))
            try:
                return function(*args, **kwargs)
            finally:
                collectives.unit = before

        return call

    def of_group(group: FSDPParamGroup, *_: Any) -> nn.Module:
        return group.modules[0]

    def of_handle(handle: FlatParamHandle, *_: Any) -> nn.Module:
        return handle._fully_sharded_module

    def of_state(state: Any, handle: FlatParamHandle, *_: Any) -> nn.Module:
        return handle._fully_sharded_module

    replacements = (
        (FSDPParamGroup, "unshard", of_group),
        (FSDPParamGroup, "post_backward", of_group),
        (FlatParamHandle, "_all_gather_flat_param", of_handle),
        (_runtime_utils, "_reduce_grad", of_state),
        (_runtime_utils, "_reduce_grad_no_shard", of_state),
    )
    with ExitStack() as stack:
        for owner, name, module_of in replacements:
            original = getattr(owner, name)
            setattr(owner, name, named(original, module_of))
            stack.callback(setattr, owner, name, original)
        yield


def _names(model: nn.Module) -> dict[int, str]:
    return {id(module): clean_name(name) for name, module in model.named_modules()}
