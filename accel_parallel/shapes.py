"""Arithmetic on the shape of `TransformerLM`: its parameters by name, and its FLOPs. Needs no torch.

L layers, H query heads, D numbers per head, C = H x D hidden, F feed-forward, V vocabulary, T tokens in a sequence.
"""

import math
from dataclasses import dataclass

LOSS_CHUNK_TOKENS = 1_024
"""Tokens whose logits exist at once under `model.loss: chunked`."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers that decide parameters and FLOPs; `spec.Model.shape` makes one."""

    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int
    ffn_dim: int
    seq_len: int
    tie_embeddings: bool

    @property
    def head_dim(self) -> int:
        """Numbers per attention head: D."""
        return self.hidden_dim // self.num_heads

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by full name, in the order of `TransformerLM.named_parameters()`.

        A tied head does not appear: it is the embedding's weight once more.
        """
        block = self._block()
        embedding = (self.vocab_size, self.hidden_dim)
        return {
            "token_emb.weight": embedding,
            **{f"blocks.{i}.{name}": shape for i in range(self.num_layers) for name, shape in block.items()},
            "norm.weight": (self.hidden_dim,),
            **({} if self.tie_embeddings else {"head.weight": embedding}),
        }

    def parameters(self) -> dict[str, int]:
        """Size of every parameter by full name, in the same order."""
        return {name: math.prod(shape) for name, shape in self.parameter_shapes().items()}

    @property
    def block_parameters(self) -> int:
        """Parameters of one `TransformerBlock`."""
        return sum(map(math.prod, self._block().values()))

    @property
    def total_parameters(self) -> int:
        """Parameters of the whole model; a tied head counts once."""
        embeddings = (1 if self.tie_embeddings else 2) * self.vocab_size * self.hidden_dim
        return embeddings + self.num_layers * self.block_parameters + self.hidden_dim

    def flops_per_token(self) -> int:
        """FLOPs of training on one token, forward and backward: 6N + 12 x L x H x D x T.

        The convention of PaLM (Chowdhery et al. 2022, appendix B): N are the parameters that take part in matrix
        products (the head even if tied, the embedding lookup and the norms not), attention counts as if every token
        saw all T, and recomputation under activation checkpointing does not count.
        """
        norms = 2 * self.hidden_dim
        in_products = self.num_layers * (self.block_parameters - norms) + self.vocab_size * self.hidden_dim
        return 6 * in_products + 12 * self.num_layers * self.num_heads * self.head_dim * self.seq_len

    def _block(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one block's parameters by their name inside it; a matrix is (out, in), as `nn.Linear` has it."""
        hidden, kv, ffn = self.hidden_dim, self.num_kv_heads * self.head_dim, self.ffn_dim
        return {
            "attn_norm.weight": (hidden,),
            "attn.q_proj.weight": (hidden, hidden),
            "attn.k_proj.weight": (kv, hidden),
            "attn.v_proj.weight": (kv, hidden),
            "attn.o_proj.weight": (hidden, hidden),
            "ffn_norm.weight": (hidden,),
            "ffn.gate_proj.weight": (ffn, hidden),
            "ffn.up_proj.weight": (ffn, hidden),
            "ffn.down_proj.weight": (hidden, ffn),
        }
