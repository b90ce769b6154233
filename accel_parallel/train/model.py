"""A decoder-only Transformer of Llama's architecture. Knows nothing of devices or processes.

RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases, no dropout. The weights mean what those of
Hugging Face's `LlamaForCausalLM` mean; only their names differ.

Shapes: B sequences, T tokens, C hidden, H query heads, G key/value heads, D = C / H, F feed-forward, V vocabulary,
N = B x T tokens, K tokens of one chunk.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from accel_parallel.shapes import LOSS_CHUNK_TOKENS
from accel_parallel.spec import Model

IGNORE_LABEL = -100
INIT_STD = 0.02

# What selective checkpointing keeps: the results that cost the most to compute again for the memory they take.
_KEEP_SELECTED = partial(
    create_selective_checkpoint_contexts,
    [
        torch.ops.aten.mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    ],
)


class TransformerLM(nn.Module):
    """The language model. Construction leaves the weights uninitialised; call `init_weights` or load some.

    Works under `torch.device("meta")`; there are no buffers, so materialising the parameters is enough.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.tie_embeddings = model.tie_embeddings
        self.token_emb = nn.Embedding.from_pretrained(torch.empty(model.vocab_size, model.hidden_dim), freeze=False)
        self.blocks = nn.Sequential(*(TransformerBlock(model) for _ in range(model.num_layers)))
        self.norm = nn.RMSNorm(model.hidden_dim, eps=model.norm_eps)
        self.head = LMHead(model)
        self.tie_weights()

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (B, T, V), or with labels their loss.

        `tokens` (B, T) int64. `labels` (B, T) int64 are the tokens to predict, already shifted: `labels[:, t]` follows
        `tokens[:, t]`. The loss is a float32 scalar whatever the parameters' type: the mean cross-entropy in nats over
        the labels that are not -100 (NaN if all are).
        """
        x = self.token_emb(tokens)  # (B, T, C)
        x = self.blocks(x)
        out: Tensor = self.head(self.norm(x), labels)
        return out

    def tie_weights(self) -> None:
        """If the model is tied, make the head use the embedding's weight; to be repeated after replacing parameters."""
        if self.tie_embeddings:
            self.head.weight = self.token_emb.weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill every parameter: equal seeds give equal numbers on any device. torch's global generator is left alone.

        Norms 1; all else normal with standard deviation 0.02, divided by sqrt(2 x layers) for the two projections of a
        block that write to the residual stream (Radford et al. 2019, "GPT-2", section 2.3).
        """
        self.tie_weights()
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = INIT_STD / math.sqrt(2 * len(self.blocks)) if writes_residual else INIT_STD
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.activation_checkpointing = model.activation_checkpointing
        self.attn_norm = nn.RMSNorm(model.hidden_dim, eps=model.norm_eps)
        self.attn = Attention(model)
        self.ffn_norm = nn.RMSNorm(model.hidden_dim, eps=model.norm_eps)
        self.ffn = FeedForward(model)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        # Inside the module and not around it, so that hooks on the block run once, outside of what is recomputed.
        if self.activation_checkpointing == "none" or not (self.training and torch.is_grad_enabled()):
            return self._layers(x)
        contexts = _KEEP_SELECTED if self.activation_checkpointing == "selective" else noop_context_fn
        out: Tensor = checkpoint(self._layers, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        return out

    def _layers(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))  # (B, T, C)
        return x + self.ffn(self.ffn_norm(x))


class Attention(nn.Module):
    """Causal self-attention in which H / G query heads share a key and value head (Ainslie et al. 2023, "GQA")."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        shape = model.shape
        self.head_dim, self.rope_theta = shape.head_dim, model.rope_theta
        self.grouped = model.num_heads != model.num_kv_heads
        self.q_proj = Linear(model.hidden_dim, model.num_heads * shape.head_dim)
        self.k_proj = Linear(model.hidden_dim, model.num_kv_heads * shape.head_dim)
        self.v_proj = Linear(model.hidden_dim, model.num_kv_heads * shape.head_dim)
        self.o_proj = Linear(model.num_heads * shape.head_dim, model.hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )  # (B, H, T, D), (B, G, T, D), (B, G, T, D)
        cos, sin = rotary_angles(x.size(1), self.head_dim, self.rope_theta, x.device)  # (T, D / 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)  # (B, H, T, D)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate_proj = Linear(model.hidden_dim, model.ffn_dim)
        self.up_proj = Linear(model.hidden_dim, model.ffn_dim)
        self.down_proj = Linear(model.ffn_dim, model.hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # inside: (B, T, F)
        return out


class LMHead(nn.Module):
    """The output matrix and the loss.

    The loss lives here because `weight` may be whole only while this module's own forward runs.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.chunked = model.loss == "chunked"
        self.weight = nn.Parameter(torch.empty(model.vocab_size, model.hidden_dim))

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """`hidden` (B, T, C) -> logits (B, T, V), or with `labels` (B, T) the float32 loss."""
        if labels is None:
            return F.linear(hidden, self.weight)  # (B, T, V)
        hidden, labels = hidden.flatten(0, 1), labels.flatten()  # (N, C), (N,)
        if self.chunked:
            loss: Tensor = ChunkedCrossEntropy.apply(hidden, self.weight, labels, torch.is_grad_enabled())
            return loss
        logits = F.linear(hidden, self.weight).float()  # (N, V)
        return F.cross_entropy(logits, labels, ignore_index=IGNORE_LABEL)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of a linear layer, with the logits of `LOSS_CHUNK_TOKENS` tokens at a time.

    A chunk's logits give its gradients at once, so nothing of their size outlives the chunk and none is computed twice.
    Weight gradients add up in float32. torch 2.13's `F.linear_cross_entropy` works alike, but sums and returns the loss
    in the type of its inputs: of bfloat16 inputs it was off by 3e-2, this by 2e-6.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, with_grad: bool) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        ctx.dtypes = hidden.dtype, weight.dtype
        hidden, weight = hidden.to(dtype), weight.to(dtype)  # (N, C), (V, C)
        count = (labels != IGNORE_LABEL).sum()
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        if with_grad:
            hidden_grad = torch.empty_like(hidden)
            weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden), LOSS_CHUNK_TOKENS):
            chunk = slice(start, start + LOSS_CHUNK_TOKENS)
            valid = (labels[chunk] != IGNORE_LABEL).unsqueeze(1)  # (K, 1)
            label = labels[chunk].unsqueeze(1).where(valid, 0)
            table = F.log_softmax(F.linear(hidden[chunk], weight), dim=-1, dtype=torch.float32)  # (K, V): log p
            loss -= table.gather(1, label).where(valid, 0.0).sum()
            if with_grad:
                table.exp_().scatter_add_(1, label, torch.full_like(label, -1.0, dtype=torch.float32))
                table = table.mul_(valid / count).to(dtype)  # (K, V): d loss / d logits
                torch.mm(table, weight, out=hidden_grad[chunk])
                weight_grad += table.T @ hidden[chunk]
            del table  # or it would live beside the next chunk's
        if with_grad:
            ctx.save_for_backward(hidden_grad, weight_grad)
        return loss / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_grad, weight_grad = (
            torch.mul(saved, grad, out=torch.empty_like(saved, dtype=dtype))
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return hidden_grad, weight_grad, None, None


class Linear(nn.Linear):
    """A matrix without bias, left uninitialised: `TransformerLM.init_weights` fills it."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        pass


def rotary_angles(seq_len: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, (T, D / 2) float32 (Su et al. 2021, "RoFormer").

    Computed anew in every block: a buffer would be lost in meta-device loading, and an argument of the block may arrive
    cast to bfloat16, whose 8 bits blur the positions.
    """
    frequency = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.arange(seq_len, device=device, dtype=torch.float32).unsqueeze(1) * frequency  # (T, D / 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs of channels (i, i + D / 2), as Llama does, by the position's angles; (B, H, T, D) in and out."""
    a, b = x.float().chunk(2, dim=-1)  # (B, H, T, D / 2) each
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
