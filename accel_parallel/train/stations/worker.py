"""From a worker's environment to Accelerate's state, in the order of `Accelerator.__init__` (accelerator.py, 1.15)."""

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import accelerate.state
import accelerate.utils.dataclasses
import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    AORecipeKwargs,
    DeepSpeedPlugin,
    DistributedType,
    FullyShardedDataParallelPlugin,
    MegatronLMPlugin,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
    TorchDynamoPlugin,
)
from accelerate.utils.environment import parse_choice_from_env, parse_flag_from_env

from accel_parallel.train.stations.pretend import in_one_line, only_environment, replaced, silence

# Read by Accelerate alone, so that only its state tells whether they matter; the rest is for CUDA, OpenMP and torch.
_ACCELERATES_OWN = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "RANK", "LOCAL_RANK", "WORLD_SIZE")
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
"""Of a process group, which a process without WORLD_SIZE does not join."""
_RECIPES = {"AO": AORecipeKwargs, "TE": TERecipeKwargs, "MSAMP": MSAMPRecipeKwargs}


def state_of(environment: Mapping[str, str]) -> dict[str, str]:
    """What `Accelerator()` makes of this environment on a machine with GPUs: its state by name, as text to compare.

    `error` is what Accelerate refuses, beside what it had built until then. WORLD_SIZE says how many processes there
    are; without it there is one, and no process group. No process group is made, no device is touched.
    """
    not_told = _ACCELERATES_OWN if "WORLD_SIZE" in environment else (*_ACCELERATES_OWN, *_RENDEZVOUS)
    state = {name: environment[name] for name in environment if not name.startswith(not_told)}
    try:
        with ExitStack() as stack:
            stack.enter_context(silence())
            stack.enter_context(only_environment(environment))
            for owner, values in _elsewhere():
                stack.enter_context(replaced(owner, **values))
            for name, value in _built():
                state[name] = _text(value)
    except Exception as error:  # the plugins refuse with whatever their lines happen to raise
        state["error"] = in_one_line(error)
    return state


def _elsewhere() -> Iterator[tuple[Any, dict[str, Any]]]:
    """A machine with a GPU, where version 1 finds a device to synchronise on, and with every library for fp8."""
    yield torch.cuda, {"current_device": lambda: 0}
    yield accelerate.state, {"is_fp8_available": lambda: True, "check_cuda_fp8_capability": lambda: True}
    available = {"is_cuda_available": lambda: True, "is_transformer_engine_available": lambda: True}
    yield accelerate.utils.dataclasses, available
    # Importing transformers is all that it would do.
    yield DeepSpeedPlugin, {"select": lambda *_, **__: None}


def _built() -> Iterator[tuple[str, Any]]:
    dynamo = TorchDynamoPlugin()
    yield from _fields("dynamo", dynamo)
    deepspeed = DeepSpeedPlugin() if _on("ACCELERATE_USE_DEEPSPEED") else None
    fsdp = FullyShardedDataParallelPlugin() if _on("ACCELERATE_USE_FSDP") else None
    if fsdp is not None:
        yield from _fields("plugin", fsdp)
    megatron = MegatronLMPlugin() if _on("ACCELERATE_USE_MEGATRON_LM") else None
    parallelism = ParallelismConfig() if _on("ACCELERATE_USE_PARALLELISM_CONFIG") else None
    if parallelism is not None:
        yield from _fields("parallelism", parallelism)
    # This process may have a state of its own, which all instances of the class share.
    separate: Any = type("State", (AcceleratorState,), {"_shared_state": {}})
    with replaced(PartialState, _shared_state=_process()):
        state = separate(
            dynamo_plugin=dynamo,
            deepspeed_plugin=deepspeed,
            fsdp_plugin=fsdp,
            megatron_lm_plugin=megatron,
            parallelism_config=parallelism,
            _from_accelerator=True,
        )
        yield "mixed_precision", state._mixed_precision
        for name in ("distributed_type", "num_processes", "debug"):
            yield name, getattr(state, name)
        yield "cpu", state._cpu
        version_2 = fsdp is not None and fsdp.fsdp_version == 2
    yield "cpu_affinity", parse_flag_from_env("ACCELERATE_CPU_AFFINITY")
    for name, plugin in {"plugin": fsdp, "deepspeed": deepspeed, "megatron_lm": megatron}.items():
        if plugin is not None:
            yield from _fields(name, plugin)
    if parallelism is not None:
        parallelism._validate_accelerator(
            SimpleNamespace(
                multi_device=str(state.distributed_type).startswith("MULTI_") and state.num_processes > 1,
                num_processes=state.num_processes,
                is_fsdp2=state.distributed_type == DistributedType.FSDP and version_2,
                distributed_type=state.distributed_type,
                is_main_process=True,
            )
        )
        yield from _fields("parallelism", parallelism)
    if state._mixed_precision == "fp8":
        backend = parse_choice_from_env("ACCELERATE_FP8_BACKEND", "NO")
        yield "fp8.backend", backend
        # Without a backend Accelerate takes the first that is installed: torchao, Transformer Engine, MS-AMP.
        yield from _fields("fp8", _RECIPES[backend if backend != "NO" else "TE"]())
    yield "gradient_accumulation_steps", int(parse_choice_from_env("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", 1))


def _process() -> dict[str, Any]:
    """What `PartialState` holds once the process group stands. The device is one that nothing is switched on for."""
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU")
    kind = DistributedType.NO
    if "WORLD_SIZE" in os.environ:
        kind = DistributedType.MULTI_CPU if cpu else DistributedType.MULTI_GPU
    if _on("ACCELERATE_USE_DEEPSPEED"):
        kind = DistributedType.DEEPSPEED
    return {
        "_cpu": cpu,
        "backend": None,
        "device": torch.device("cpu" if cpu else "meta"),
        "debug": parse_flag_from_env("ACCELERATE_DEBUG_MODE"),
        "distributed_type": kind,
        "num_processes": int(os.environ.get("WORLD_SIZE", "1")),
        "process_index": 0,
        "local_process_index": 0,
        "fork_launched": False,
    }


def _on(name: str) -> bool:
    return os.environ.get(name, "false").lower() == "true"


def _fields(name: str, plugin: Any) -> Iterator[tuple[str, Any]]:
    for field in fields(plugin):
        yield f"{name}.{field.name}", getattr(plugin, field.name)


def _text(value: Any) -> str:
    """The same for equal values in every process: no addresses."""
    if isinstance(value, Enum):
        return str(value.name)
    if isinstance(value, functools.partial):
        return f"{_text(value.func)}({_text(value.args)}, {_text(value.keywords)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ", ".join(repr(inner) if isinstance(inner, str) else _text(inner) for inner in value) + "]"
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return str(value)
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    held = {field.name: getattr(value, field.name) for field in fields(value)} if is_dataclass(value) else vars(value)
    return type(value).__name__ + (_text(held) if held else "")
