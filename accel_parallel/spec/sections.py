"""The sections of the specification about what is learned and reported; `spec/run.py` puts all together."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from accel_parallel.hardware import ACCELERATORS
from accel_parallel.shapes import ModelShape
from accel_parallel.spec.fields import (
    Count,
    Dimension,
    Flag,
    NonNegative,
    Real,
    Section,
    parse_count,
)
from accel_parallel.spec.presets import PRESETS
from accel_parallel.suggest import did_you_mean


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
    init_from: str | None = None
    """A folder with a Hugging Face Llama checkpoint of this shape, whose weights a new run starts from; null: none."""

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


def default_warmup(steps: Any) -> int:
    """Warm-up of a training of so many steps; 0 for what is no number of steps, which is refused elsewhere."""
    try:
        count = parse_count(steps)
    except ValueError:
        return 0
    return min(count // 8, 1000) if isinstance(count, int) and count > 0 else 0


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
    """Steps over which the learning rate rises linearly from 0. Left out: an eighth of the steps, at most 1000."""
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

    @model_validator(mode="before")
    @classmethod
    def _warmup_follows_steps(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("warmup_steps") is None:
            return {**values, "warmup_steps": default_warmup(values.get("steps", cls.model_fields["steps"].default))}
        return values

    @model_validator(mode="after")
    def _schedule(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above lr {self.lr:g}")
        if self.warmup_steps > self.steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} is more than steps {self.steps}; lower it, or leave it out"
            )
        return self


class Checkpoint(Section):
    """When to save, and how many to keep."""

    every: NonNegative = 40
    """Save each so many steps; 0 only at the end."""
    keep: Count = 2
    """How many of the newest complete checkpoints stay."""
    async_: Flag = Field(default=False, alias="async")
    """Write while training goes on; takes host memory for a copy of what is saved."""
    verify: Flag = True
    """Read the digests of a checkpoint before going on from it; false saves the time for huge ones."""


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
