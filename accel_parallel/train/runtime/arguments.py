"""What Accelerate is told, from the specification and from what the launch asked for."""

import os
from datetime import timedelta
from typing import Any

import torch
from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy

from accel_parallel.errors import Problem, SpecError
from accel_parallel.hardware import ACCELERATORS
from accel_parallel.metrics import mfu
from accel_parallel.spec import RunSpec
from accel_parallel.train.runtime.asked import Asked, Parallelism


def adapt_spec(spec: RunSpec, asked: Asked) -> RunSpec:
    """The specification with what the launch really asked for: its world, precision and sharding. The YAML decides.

    Raises SpecError if the batch does not divide, or if the launch asks for what this loop does not do.
    """
    if asked.mixed_precision not in ("no", "bf16"):
        message = f"mixed_precision {asked.mixed_precision} in the accelerate YAML: this loop trains with no or bf16"
        raise SpecError([Problem(message, code="spec-precision")])
    if asked.activation_checkpointing and spec.model.activation_checkpointing != "none":
        message = (
            "activation checkpointing is asked for twice: model.activation_checkpointing "
            f"{spec.model.activation_checkpointing} and fsdp_activation_checkpointing in the YAML; keep one"
        )
        raise SpecError([Problem(message, code="spec-checkpointing")])
    changes: dict[str, Any] = {
        "distributed": spec.distributed.model_copy(
            update={
                "num_machines": asked.num_machines,
                "processes_per_machine": asked.local_world_size,
                "mixed_precision": asked.mixed_precision,
            }
        )
    }
    if asked.fsdp:
        changes["fsdp"] = spec.fsdp.model_copy(update=asked_sharding(asked))
    spec = spec.model_copy(update=changes)
    problem = spec.batch_problem()
    if problem:
        raise SpecError([Problem(problem, code="spec-batch")])
    return spec


def asked_sharding(asked: Asked) -> dict[str, Any]:
    """The keys of the specification's fsdp section that the launch's environment decides."""
    return {
        "version": 2 if asked.parallelism is Parallelism.FSDP2 else 1,
        "sharding_strategy": asked.sharding_strategy,
        "cpu_offload": asked.cpu_offload,
    }


def overruled(spec: RunSpec, asked: Asked) -> list[str]:
    """One line for each key of the specification that the accelerate YAML overrules: it was edited, or the YAML was."""
    if not asked.fsdp:
        return []
    return [
        f"fsdp.{key} is {getattr(spec.fsdp, key)} in the specification, {value} in the accelerate YAML, which decides; "
        "`accel-parallel config` brings it up to date"
        for key, value in asked_sharding(asked).items()
        if getattr(spec.fsdp, key) != value
    ]


def model_flops_utilisation(spec: RunSpec, tokens_per_sec: float, num_processes: int) -> float:
    """MFU of `spec` at this rate over all processes, against the dense bf16 peak of its accelerator."""
    peak = ACCELERATORS[spec.hardware.accelerator].peak_bf16_tflops
    return mfu(tokens_per_sec, spec.model.shape.flops_per_token(), peak, num_processes)


def accelerator_arguments(spec: RunSpec, asked: Asked, *, on_cpu: bool) -> dict[str, Any]:
    """What `Accelerator` is told besides the launcher's environment."""
    arguments: dict[str, Any] = {
        "kwargs_handlers": [
            DistributedDataParallelKwargs(
                bucket_cap_mb=spec.ddp.bucket_cap_mb,
                gradient_as_bucket_view=spec.ddp.gradient_as_bucket_view,
                static_graph=spec.ddp.static_graph,
            )
        ],
        "gradient_accumulation_plugin": GradientAccumulationPlugin(
            num_steps=spec.training.grad_accum_steps,
            sync_with_dataloader=False,
            sync_each_batch=asked.fsdp and spec.fsdp.sync_each_batch,
        ),
    }
    if asked.fsdp:
        arguments["fsdp_plugin"] = fsdp_plugin(asked, on_cpu=on_cpu)
    return arguments


def fsdp_plugin(asked: Asked, *, on_cpu: bool) -> FullyShardedDataParallelPlugin:
    """Accelerate's plugin from the environment, with gradients reduced in float32.

    Accelerate's own bf16 policy reduces gradients in bf16 and, in version 2, casts the returned loss to bf16
    (utils/dataclasses.py, 1.15); DDP does neither, and the strategies must agree.
    """
    plugin = FullyShardedDataParallelPlugin()
    if os.environ.get("ACCELERATE_MIXED_PRECISION", "no") == "bf16":
        plugin.mixed_precision_policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if asked.parallelism is Parallelism.FSDP2
            else MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        )
    if on_cpu and asked.cpu_offload:
        version2 = asked.parallelism is Parallelism.FSDP2
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False) if version2 else CPUOffload(offload_params=False)
    return plugin


def process_group_options(spec: RunSpec, asked: Asked, *, device_type: str) -> dict[str, Any]:
    """What the process group is told: how long to wait, and over what to talk."""
    if asked.world_size == 1:
        return {}
    options: dict[str, Any] = {"timeout": timedelta(minutes=spec.distributed.timeout_minutes)}
    if device_type == "cuda":
        # auto has gloo beside NCCL: checkpoints of offloaded shards and asynchronous saves use CPU tensors.
        backends = {"auto": "cuda:nccl,cpu:gloo", "nccl": "nccl", "gloo": "gloo"}
        options["backend"] = backends[spec.distributed.backend]
    return options
