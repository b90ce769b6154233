"""What Accelerate is told, from the specification and from what the launch asked for."""

import os
from datetime import timedelta
from typing import Any

import torch
from accelerate.utils import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from accel_parallel.asked import Asked, Parallelism
from accel_parallel.hardware import ACCELERATORS
from accel_parallel.metrics import mfu
from accel_parallel.spec import RunSpec


def model_flops_utilisation(spec: RunSpec, tokens_per_sec: float, num_processes: int) -> float:
    """MFU of `spec` at this rate over all processes, against the dense bf16 peak of its accelerator."""
    peak = ACCELERATORS[spec.hardware.accelerator].peak_bf16_tflops
    return mfu(tokens_per_sec, spec.model.shape.flops_per_token(), peak, num_processes)


def accelerator_arguments(spec: RunSpec, asked: Asked) -> dict[str, Any]:
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
        arguments["fsdp_plugin"] = fsdp_plugin(asked)
    return arguments


def fsdp_plugin(asked: Asked) -> FullyShardedDataParallelPlugin:
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
