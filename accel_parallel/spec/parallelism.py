"""The sections of the specification that say how training is spread over processes."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from accel_parallel.spec.fields import (
    Count,
    Flag,
    NoIsAWord,
    Number,
    Section,
    carried_by_yaml,
    passed_to_accelerator,
    refuse_bool,
)


class Distributed(Section):
    """How many processes, where, and at which precision."""

    backend: Annotated[Literal["auto", "nccl", "gloo"], passed_to_accelerator()] = "auto"
    """Communication backend; auto is NCCL with gloo beside it on GPUs, gloo on CPUs."""
    num_machines: Annotated[Count, carried_by_yaml()] = 1
    """Machines in the job."""
    processes_per_machine: Annotated[Count, carried_by_yaml()] = 2
    """Processes on each machine, one per GPU."""
    mixed_precision: Annotated[Literal["no", "bf16"], NoIsAWord, carried_by_yaml()] = "bf16"
    """bf16 computes in bfloat16 with float32 weights, optimizer and gradient reduction; 'no' is float32."""
    timeout_minutes: Annotated[Count, passed_to_accelerator()] = 30
    """How long a collective waits for the other processes before it gives up."""
    main_process_ip: Annotated[str | None, Field(pattern=r"^\S+$"), carried_by_yaml()] = None
    """Address of machine 0, needed with several machines: here, or as --main_process_ip at launch."""
    main_process_port: Annotated[Number | None, Field(ge=1, le=65535), carried_by_yaml()] = None
    """Port on machine 0; null is Accelerate's 29500 (on one machine a free port if that is taken)."""


class Ddp(Section):
    """What DistributedDataParallel is told."""

    bucket_cap_mb: Annotated[Count, passed_to_accelerator()] = 25
    """Size in MiB of the buckets in which gradients are reduced."""
    gradient_as_bucket_view: Annotated[Flag, passed_to_accelerator()] = True
    """Let gradients be views of the buckets: one copy of the gradients less."""
    static_graph: Annotated[Flag, passed_to_accelerator()] = False
    """Promise that every step uses the same parameters in the same order."""


ShardingStrategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]


class Fsdp(Section):
    """What FullyShardedDataParallel is told."""

    version: Annotated[Literal[1, 2], BeforeValidator(refuse_bool), carried_by_yaml()] = 2
    """2 is torch's fully_shard, 1 the older FullyShardedDataParallel class."""
    sharding_strategy: Annotated[ShardingStrategy, carried_by_yaml()] = "FULL_SHARD"
    """FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD or (version 1) NO_SHARD."""
    wrap: Annotated[Literal["block", "size", "none"], carried_by_yaml()] = "block"
    """What becomes a unit: each block, each module above the threshold, or none; left out: block, size in version 1."""
    min_num_params: Annotated[Count, carried_by_yaml()] = 1_000_000
    """The threshold in parameters: the smallest module (wrap block: TransformerBlock) that becomes a unit."""
    cpu_offload: Annotated[Flag, carried_by_yaml()] = False
    """Keep parameters, gradients and optimizer state in host memory between uses."""
    dp_replicate: Annotated[Count | None, carried_by_yaml()] = None
    """HYBRID_SHARD of version 2: replicas of the sharded model; null is one per machine, on one machine 2."""
    cpu_ram_efficient_loading: Annotated[Flag, carried_by_yaml()] = True
    """Only process 0 holds the initial weights in host memory; the others receive their shards."""
    sync_each_batch: Annotated[Flag, passed_to_accelerator()] = True
    """With gradient accumulation, reduce after each micro-batch instead of holding unsharded gradients."""

    @model_validator(mode="before")
    @classmethod
    def _wrap_follows_version(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("wrap") is None:
            return {**values, "wrap": "size" if values.get("version", 2) == 1 else "block"}
        return values

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.version == 2 and self.sharding_strategy == "NO_SHARD":
            raise ValueError("NO_SHARD does not exist in FSDP version 2; use the strategy ddp, or fsdp.version: 1")
        if self.dp_replicate is not None and not (self.version == 2 and self.sharding_strategy == "HYBRID_SHARD"):
            raise ValueError(
                "dp_replicate belongs to HYBRID_SHARD of version 2; "
                f"this is {self.sharding_strategy} of version {self.version}"
            )
        return self
