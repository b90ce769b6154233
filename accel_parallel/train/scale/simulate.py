"""A training step of one process of a world of any size: its shards, its collectives, its memory.

The optimizer's loop is the one that torch takes on CPUs; on GPUs it handles all tensors at once (`foreach`), with
temporaries of the size of the shard.
"""

import resource
import sys
import time
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard

from accel_parallel.spec import RunSpec
from accel_parallel.train.model import TransformerLM
from accel_parallel.train.optimize import build_optimizer
from accel_parallel.train.probe import ignore_phase, observe_collectives
from accel_parallel.train.scale.live import peak_live
from accel_parallel.train.scale.world import SimulatedRuntime, World
from accel_parallel.train.training_step import training_step

_FLOAT32 = 4


def simulate(spec: RunSpec, world: World) -> dict[str, Any]:
    """What one step would cost process `world.rank`, under the strategy in the launcher's environment. Sizes in bytes.

    Each process keeps the micro-batch that `spec` gives it, and the asked precision. Changes this process's
    environment and parts of torch: nothing else can be trained in it afterwards. Raises LaunchError for a world that
    cannot be, and whatever the runtime raises at the start of a training.
    """
    began = time.perf_counter()
    micro_batch = spec.training.batch_size // (spec.num_processes * spec.training.grad_accum_steps)
    world.enter()
    runtime = SimulatedRuntime.start(_scaled(spec, world, micro_batch), force_cpu=True, keep_precision=True)
    # Accumulating only repeats the passes; this one is the last of a step, which synchronizes.
    runtime.accelerator.gradient_accumulation_steps = 1
    with FakeTensorMode():
        fresh = TransformerLM(spec.model)
        tokens = torch.zeros(micro_batch, spec.model.seq_len, dtype=torch.int64)  # (B, T)
        model, optimizer = runtime.prepare(fresh, build_optimizer(fresh, spec.training), tokens, tokens)

        step = training_step(runtime, model, optimizer, tokens, tokens)

        # The first makes the optimizer's state, and lets DTensor find out shapes on tensors of global size.
        step(ignore_phase)
        optimizer.zero_grad()
        cost, resting = observe_collectives(model, optimizer, step)
        peak = peak_live(lambda: step(ignore_phase), resting)
    assert runtime.observed is not None
    own, whole = runtime.observed.local_elements * _FLOAT32, spec.model.shape.total_parameters * _FLOAT32
    shards = shard_bytes(model) or [own]
    return {
        "simulated": True,
        "world_size": world.world_size,
        "rank": world.rank,
        "parameters": spec.model.shape.total_parameters,
        "shard": {
            "this_rank": own,
            "smallest": min(shards),
            "largest": max(shards),
            "even": -(-whole // runtime.asked.shard_size),
        },
        "memory": {**asdict(cost.memory), "peak": peak},
        "traffic": [item.to_dict() for item in cost.traffic],
        "substitutions": [item.to_dict() for item in runtime.substitutions if item.key != "mixed_precision"],
        "seconds": time.perf_counter() - began,
        "peak_rss_bytes": peak_rss(),
    }


def shard_bytes(model: nn.Module) -> list[int]:
    """Bytes of the parameters in each process of a shard group, by its rank there; empty without version 2's shards.

    Rows go by torch.chunk's rule: all chunks are of one size, rounded up, until nothing is left (torch 2.13,
    distributed/tensor/placement_types.py). Version 1 pads instead, and all shards are of one size.
    """
    sizes: list[int] = []
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            return []
        along, shard = next((i, p) for i, p in enumerate(parameter.placements) if isinstance(p, Shard))
        processes, rows = parameter.device_mesh.size(along), parameter.shape[shard.dim]
        sizes = sizes or [0] * processes
        row = parameter.numel() // rows * parameter.element_size()
        chunk = -(-rows // processes)
        for rank in range(processes):
            sizes[rank] += row * max(0, min(chunk, rows - rank * chunk))
    return sizes


def peak_rss() -> int:
    """Most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _scaled(spec: RunSpec, world: World, micro_batch: int) -> RunSpec:
    batch_size = micro_batch * world.world_size * spec.training.grad_accum_steps
    spec = spec.with_world(world.world_size // world.local_world_size, world.local_world_size)
    return spec.model_copy(update={"training": spec.training.model_copy(update={"batch_size": batch_size})})
