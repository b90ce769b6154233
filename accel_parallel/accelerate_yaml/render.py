"""A specification and a strategy become keys of Accelerate's YAML; nowhere else.

The fewest keys that decide, plus those whose default differs between Accelerate's launcher and its plugin, in reading
order, and none that the asked-for FSDP version ignores. Verified on Accelerate 1.15.
"""

from typing import Any

from accel_parallel.errors import Problem, SpecError
from accel_parallel.spec import RunSpec
from accel_parallel.strategies import Kind, Strategy

BLOCK_CLASS = "TransformerBlock"

Config = dict[str, Any]


def render(spec: RunSpec, strategy: Strategy, *, foreign: bool = False) -> Config:
    """The keys of the YAML that `spec` (with the strategy's overrides applied) becomes.

    `foreign`: a script with a model of its own is to run under it, so that nothing is said of `TransformerLM`.
    Raises SpecError listing everything that stands against it.
    """
    problems = _problems(spec, strategy.kind, foreign)
    if problems:
        raise SpecError(
            Problem(f"{strategy.name}: {text}", code="not-renderable", hint=hint) for text, hint in problems
        )
    match strategy.kind:
        case Kind.NO:
            return {"distributed_type": "NO", "num_processes": 1, **_precision(spec)}
        case Kind.DDP:
            return {"distributed_type": "MULTI_GPU", **_processes(spec), **_precision(spec)}
        case Kind.FSDP:
            wrap = _foreign_wrap(spec) if foreign else _wrap(spec)
            fsdp = _fsdp2(spec, wrap) if spec.fsdp.version == 2 else _fsdp1(spec, wrap)
            return {
                "distributed_type": "FSDP",
                **_processes(spec),
                **_precision(spec),
                "fsdp_config": fsdp,
                **_mesh(spec),
            }


def _processes(spec: RunSpec) -> Config:
    """`machine_rank` is never written: the file is the same on every machine, the rank is not."""
    distributed = spec.distributed
    config: Config = {"num_processes": spec.num_processes}
    if distributed.num_machines > 1:
        config["num_machines"] = distributed.num_machines
        if distributed.main_process_ip is not None:
            config["main_process_ip"] = distributed.main_process_ip
    if distributed.main_process_port is not None:
        config["main_process_port"] = distributed.main_process_port
    return config


def _precision(spec: RunSpec) -> Config:
    return {"mixed_precision": spec.distributed.mixed_precision}


def _fsdp2(spec: RunSpec, wrap: Config) -> Config:
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": spec.fsdp.sharding_strategy != "SHARD_GRAD_OP",
        **wrap,
        **_offload(spec),
        "fsdp_cpu_ram_efficient_loading": spec.fsdp.cpu_ram_efficient_loading,
    }


def _fsdp1(spec: RunSpec, wrap: Config) -> Config:
    sharded = spec.fsdp.sharding_strategy != "NO_SHARD"
    return {
        "fsdp_version": 1,
        "fsdp_sharding_strategy": spec.fsdp.sharding_strategy,
        **wrap,
        **_offload(spec),
        **({"fsdp_backward_prefetch": "BACKWARD_PRE"} if sharded else {}),
        "fsdp_use_orig_params": True,
        "fsdp_sync_module_states": True,
        "fsdp_cpu_ram_efficient_loading": spec.fsdp.cpu_ram_efficient_loading,
    }


def _wrap(spec: RunSpec) -> Config:
    if spec.fsdp.wrap == "size" and largest_module(spec) >= smallest_unit(spec):
        return {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": spec.fsdp.min_num_params}
    if spec.fsdp.wrap == "block" and spec.model.shape.block_parameters >= spec.fsdp.min_num_params:
        return {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": BLOCK_CLASS}
    return {"fsdp_auto_wrap_policy": "NO_WRAP"}


def _foreign_wrap(spec: RunSpec) -> Config:
    """Without a class, Accelerate wraps those that the model names in `_no_split_modules`, as Hugging Face's do."""
    if spec.fsdp.wrap == "size":
        return {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": spec.fsdp.min_num_params}
    return {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if spec.fsdp.wrap == "block" else "NO_WRAP"}


def largest_module(spec: RunSpec) -> int:
    """Parameters of the largest module below the root: all blocks together, or the embedding."""
    shape = spec.model.shape
    return max(shape.num_layers * shape.block_parameters, spec.model.vocab_size * spec.model.hidden_dim)


def smallest_unit(spec: RunSpec) -> int:
    """Parameters that make a unit under SIZE_BASED_WRAP: the threshold in version 1, one more in version 2."""
    return spec.fsdp.min_num_params + (spec.fsdp.version == 2)


def _offload(spec: RunSpec) -> Config:
    return {"fsdp_offload_params": True} if spec.fsdp.cpu_offload else {}


def _mesh(spec: RunSpec) -> Config:
    """Version 2 knows hybrid sharding only as a mesh of two dimensions; version 1 makes a replica of each machine."""
    if spec.fsdp.version == 1 or spec.fsdp.sharding_strategy != "HYBRID_SHARD":
        return {}
    replicas = _replicas(spec)
    return {
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": replicas,
            "parallelism_config_dp_shard_size": spec.num_processes // replicas,
        }
    }


def _replicas(spec: RunSpec) -> int:
    machines = spec.distributed.num_machines
    if spec.fsdp.version == 1:
        return machines
    return spec.fsdp.dp_replicate or (machines if machines > 1 else 2)


def _problems(spec: RunSpec, kind: Kind, foreign: bool) -> list[tuple[str, str | None]]:
    """What stands against rendering, each with a hint."""
    found: list[tuple[str, str | None]] = []
    if kind is Kind.NO and spec.num_processes != 1:
        found.append((f"is one process; the specification asks for {spec.num_processes}", "use ddp or fsdp"))
    if not foreign and (batch := spec.batch_problem()):
        found.append((batch, None))
    if kind is Kind.FSDP and spec.fsdp.sharding_strategy == "HYBRID_SHARD":
        found += _hybrid_problems(spec)
    if kind is Kind.FSDP and spec.fsdp.wrap == "size" and not foreign:
        found += _tied_problems(spec)
    return found


def _hybrid_problems(spec: RunSpec) -> list[tuple[str, str | None]]:
    world, replicas = spec.num_processes, _replicas(spec)
    processes = f"{spec.distributed.num_machines} x {spec.distributed.processes_per_machine} = {world} processes"
    if replicas < 2:
        if spec.fsdp.version == 1:
            message = "HYBRID_SHARD of version 1 makes one replica per machine; one machine has nothing to replicate to"
            return [(message, "use FULL_SHARD, or fsdp.version: 2 with fsdp.dp_replicate")]
        return [("fsdp.dp_replicate 1: HYBRID_SHARD needs at least 2 replicas", "use FULL_SHARD")]
    if world % replicas:
        return [(f"fsdp.dp_replicate {replicas} does not divide {processes}", "dp_replicate x dp_shard is the world")]
    if world // replicas < 2:
        message = f"{replicas} replicas on {processes} leave {world // replicas} process to shard over"
        return [(message, f"HYBRID_SHARD with {replicas} replicas needs at least {2 * replicas} processes")]
    return []


def _tied_problems(spec: RunSpec) -> list[tuple[str, str | None]]:
    """A tied weight in two units fails in torch: version 1 on the first forward pass, version 2 while wrapping."""
    embedding, threshold = spec.model.vocab_size * spec.model.hidden_dim, spec.fsdp.min_num_params
    if not spec.model.tie_embeddings or embedding < smallest_unit(spec):
        return []
    message = f"wrap: size with min_num_params {threshold:,} would make two units of the tied token_emb and head"
    return [(message, f"they have {embedding:,} parameters; raise the threshold, use wrap: block, or untie them")]
