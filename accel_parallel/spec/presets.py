"""Model shapes by name. Values given in the specification beside `preset` win over these."""

from collections.abc import Mapping
from types import MappingProxyType

PRESETS: Mapping[str, Mapping[str, int | float | bool]] = MappingProxyType(
    {
        # Shaped so that one block holds just over 1,000,000 parameters while its parts, the token embedding and the
        # head hold fewer: a threshold of 1,000,000 makes units of exactly the blocks.
        "tiny": {
            "vocab_size": 2_048, "num_layers": 4, "num_heads": 5, "num_kv_heads": 1, "hidden_dim": 320,
            "ffn_dim": 832, "seq_len": 128, "rope_theta": 10_000.0, "norm_eps": 1e-5, "tie_embeddings": True,
        },
        # As many layers, heads and channels as GPT-2 small, in this architecture.
        "124m": {
            "vocab_size": 50_304, "num_layers": 12, "num_heads": 12, "num_kv_heads": 12, "hidden_dim": 768,
            "ffn_dim": 2_048, "seq_len": 1_024, "rope_theta": 10_000.0, "norm_eps": 1e-5, "tie_embeddings": True,
        },
        "1b": {
            "vocab_size": 32_000, "num_layers": 22, "num_heads": 32, "num_kv_heads": 4, "hidden_dim": 2_048,
            "ffn_dim": 5_632, "seq_len": 2_048, "rope_theta": 10_000.0, "norm_eps": 1e-5, "tie_embeddings": False,
        },
        # The shape of Llama 3.1 8B: 8,030,261,248 parameters.
        "llama3_8b": {
            "vocab_size": 128_256, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "hidden_dim": 4_096,
            "ffn_dim": 14_336, "seq_len": 8_192, "rope_theta": 500_000.0, "norm_eps": 1e-5, "tie_embeddings": False,
        },
    }
)  # fmt: skip
