"""The sections of the specification. Every field is documented under itself; `spec/run.py` puts them together."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from accel_parallel.hardware import ACCELERATORS
from accel_parallel.shapes import ModelShape
from accel_parallel.spec.fields import (
    Count,
    Dimension,
    Flag,
    NoIsAWord,
    NonNegative,
    Number,
    Real,
    Section,
    carried_by_yaml,
    passed_to_accelerator,
    refuse_bool,
)
from accel_parallel.spec.presets import PRESETS
from accel_parallel.suggest import did_you_mean


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


class Model(Section):
    """The shape of `TransformerLM`."""

    preset: str | None = "tiny"
    """A named shape: tiny, 124m, 1b or llama3_8b. The keys below, where given, win over it."""
    vocab_size: Dimension
    """Rows of the embedding; the tokenizer trained on your text gets this many tokens."""
    num_layers: Dimension
    """Transformer blocks."""
    num_heads: Dimension
    """Query heads; hidden_dim must be a multiple."""
    num_kv_heads: Dimension
    """Key and value heads; num_heads must be a multiple."""
    hidden_dim: Dimension
    """Width of the residual stream."""
    ffn_dim: Dimension
    """Width of the SwiGLU feed-forward layer."""
    seq_len: Dimension
    """Tokens in a training sequence."""
    rope_theta: Annotated[Real, Field(gt=0)] = 10_000.0
    """Base of the rotary position embedding."""
    norm_eps: Annotated[Real, Field(gt=0)] = 1e-5
    """Epsilon of RMSNorm."""
    tie_embeddings: Flag = True
    """Whether the head shares the embedding's weight."""
    activation_checkpointing: Literal["none", "block", "selective"] = "none"
    """Recompute in the backward pass nothing, each whole block, or all but its matrix products and attention."""
    loss: Literal["chunked", "full"] = "chunked"
    """Cross-entropy in chunks that never hold all logits at once, or from the full logits."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        name = values.get("preset", "tiny")
        if name is None:
            return values
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; one of {', '.join(PRESETS)}{did_you_mean(name, PRESETS)}")
        return {"preset": name, **PRESETS[name], **{key: value for key, value in values.items() if value is not None}}

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_dim % self.num_heads:
            raise ValueError(f"hidden_dim {self.hidden_dim} is not a multiple of num_heads {self.num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.hidden_dim // self.num_heads % 2:
            head = self.hidden_dim // self.num_heads
            raise ValueError(f"hidden_dim / num_heads is {head}; rotary embeddings need an even head size")
        return self

    @property
    def shape(self) -> ModelShape:
        """The numbers that decide parameters and FLOPs."""
        return ModelShape(**{name: getattr(self, name) for name in ModelShape.__dataclass_fields__})


class Data(Section):
    """Which text, and how it becomes tokens."""

    recipe: str = "python_stdlib"
    """A recipe (a file in data/), a file or folder of text, JSONL or Parquet, or a Hub dataset as owner/name."""
    text_column: str | None = None
    """The column that holds the text; null is the recipe's, or the only column of strings."""
    tokenizer: str = "byte_bpe"
    """byte_bpe trains a byte-level BPE on the text; otherwise an AutoTokenizer name or folder."""
    max_tokens: Count | None = 2_000_000
    """Stop preparing after this many training tokens; null takes all."""
    val_fraction: Annotated[Real, Field(gt=0, lt=1)] = 0.05
    """Share of the documents held out for validation, unless the recipe names a validation split."""
    document_boundaries: Flag = True
    """Put an end-of-text token between documents."""


class Training(Section):
    """The optimization."""

    batch_size: Count = 32
    """Global batch: sequences per optimizer step over all processes."""
    grad_accum_steps: Count = 1
    """Micro-batches per optimizer step."""
    steps: Count = 80
    """Optimizer steps."""
    lr: Annotated[Real, Field(gt=0)] = 1e-3
    """Peak learning rate of AdamW."""
    min_lr: Annotated[Real, Field(ge=0)] = 1e-4
    """Learning rate at the last step, reached along a cosine."""
    warmup_steps: NonNegative = 10
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: Annotated[Real, Field(ge=0)] = 0.1
    """Decay of the matrices; norms are not decayed."""
    betas: tuple[Annotated[Real, Field(ge=0, lt=1)], Annotated[Real, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """AdamW's running averages."""
    max_grad_norm: Annotated[Real, Field(gt=0)] | None = 1.0
    """Clip the gradient to this norm; null does not clip."""
    seed: NonNegative = 1234
    """Decides the initial weights and the order of the data."""
    deterministic: Flag = False
    """Allow only deterministic kernels (slower on GPUs)."""

    @model_validator(mode="after")
    def _schedule(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above lr {self.lr:g}")
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is more than steps {self.steps}")
        return self


class Checkpoint(Section):
    """When to save, and how many to keep."""

    every: NonNegative = 40
    """Save each so many steps; 0 only at the end."""
    keep: Count = 2
    """How many of the newest complete checkpoints stay."""


class Logging(Section):
    """What is reported, and when."""

    every: Count = 5
    """Report each so many steps: the only moments at which the loop waits for the device."""
    eval_every: NonNegative = 40
    """Validate each so many steps; 0 only at the end."""
    eval_batches: Count = 4
    """Global batches of held-out text in one validation."""
    trackers: tuple[Literal["tensorboard"], ...] = ()
    """Accelerate trackers to report to besides metrics.jsonl."""


class Hardware(Section):
    """The machine the numbers are related to."""

    accelerator: Annotated[str, Field()] = "h200"
    """The accelerator whose peak is 100 % MFU."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.accelerator not in ACCELERATORS:
            raise ValueError(
                f"unknown accelerator {self.accelerator!r}; one of {', '.join(ACCELERATORS)}"
                f"{did_you_mean(self.accelerator, ACCELERATORS)}"
            )
        return self
