"""`TransformerLM` as Hugging Face's `LlamaForCausalLM`: the names of its parameters, and `config.json`. Pure.

The keys of config.json are those of transformers' `LlamaConfig`, as nearly every published checkpoint has them; since
version 5 transformers writes `rope_parameters` and `dtype` instead of `rope_theta` and `torch_dtype`, and reads both.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_parallel.errors import DataError

if TYPE_CHECKING:  # pydantic: `--help` needs DTYPES alone
    from accel_parallel.spec import Model

DTYPES: Mapping[str, tuple[str, int]] = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}
"""What weights can be written as, by torch's name: safetensors' word for it, and the bytes of a number."""

_OUTER = {
    "token_emb.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.o_proj": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate_proj": "mlp.gate_proj",
    "ffn.up_proj": "mlp.up_proj",
    "ffn.down_proj": "mlp.down_proj",
}
_OUTER_BACK = {theirs: ours for ours, theirs in _OUTER.items()}
_BLOCK_BACK = {theirs: ours for ours, theirs in _BLOCK.items()}
_OURS = re.compile(r"blocks\.(\d+)\.([a-z_.]+)\.weight", re.ASCII)
_THEIRS = re.compile(r"model\.layers\.(\d+)\.([a-z_.]+)\.weight", re.ASCII)

# Our key, theirs, and what LlamaConfig takes where config.json lacks it (None: nothing sensible).
_KEYS: tuple[tuple[str, str, Any], ...] = (
    ("vocab_size", "vocab_size", None),
    ("num_layers", "num_hidden_layers", None),
    ("num_heads", "num_attention_heads", None),
    ("num_kv_heads", "num_key_value_heads", None),
    ("hidden_dim", "hidden_size", None),
    ("ffn_dim", "intermediate_size", None),
    ("seq_len", "max_position_embeddings", 2048),
    ("rope_theta", "rope_theta", 10_000.0),
    ("norm_eps", "rms_norm_eps", 1e-6),
    ("tie_embeddings", "tie_word_embeddings", False),
)
_TYPES: Mapping[str, type] = {"rope_theta": float, "norm_eps": float, "tie_embeddings": bool}
"""Of our keys; the others are whole numbers."""


def llama_name(name: str) -> str:
    """Llama's name of a parameter of `TransformerLM`. Raises KeyError if it has no such parameter."""
    if match := _OURS.fullmatch(name):
        return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.weight"
    return _OUTER[name]


def our_name(name: str) -> str | None:
    """`TransformerLM`'s name of a parameter of Llama, None if it has none like it."""
    if match := _THEIRS.fullmatch(name):
        part = _BLOCK_BACK.get(match[2])
        return f"blocks.{match[1]}.{part}.weight" if part else None
    return _OUTER_BACK.get(name)


def llama_config(model: "Model", end_of_text: int | None, dtype: str) -> dict[str, Any]:
    """What stands in config.json. `dtype` is torch's name of the weights' type, such as float32.

    There is no beginning-of-text token: the loop trains without one.
    """
    shape = {theirs: getattr(model, ours) for ours, theirs, _ in _KEYS}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape,
        "head_dim": model.shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "rope_scaling": None,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def shape_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `model` that a config.json decides. Raises DataError for one that is missing or of another type."""
    rope = _rope(config)
    given = {**config, **({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {})}
    if given.get("num_key_value_heads") is None:
        given["num_key_value_heads"] = given.get("num_attention_heads")
    shape = {}
    for ours, theirs, default in _KEYS:
        value, wanted = given.get(theirs, default), _TYPES.get(ours, int)
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not wanted:
            words = {int: "a whole number", float: "a number", bool: "true or false"}[wanted]
            raise DataError(f"{theirs} is {str(value)[:60]!r}, not {words}" if theirs in given else f"lacks {theirs}")
        shape[ours] = value
    return shape


def refusals(config: Mapping[str, Any]) -> list[str]:
    """What `TransformerLM` cannot represent, each with its value."""
    rope, head = _rope(config), config.get("head_dim")
    scaling = rope.get("rope_type", rope.get("type", "default"))
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    usual = hidden / heads if isinstance(hidden, int) and isinstance(heads, int) and heads else head
    found = [
        (config.get("model_type") != "llama", "model_type", config.get("model_type"), "llama"),
        (config.get("hidden_act", "silu") != "silu", "hidden_act", config.get("hidden_act"), "silu"),
        (bool(config.get("attention_bias")), "attention_bias", True, "false"),
        (bool(config.get("mlp_bias")), "mlp_bias", True, "false"),
        (scaling != "default", "rope_scaling", scaling, "none"),
        (head is not None and head != usual, "head_dim", head, f"hidden_size / num_attention_heads, {usual}"),
        (config.get("quantization_config") is not None, "quantization_config", "set", "none"),
    ]
    return [f"{key} {str(value).lower()[:40]} instead of {ours}" for wrong, key, value, ours in found if wrong]


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Its settings, of whichever version of transformers."""
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(config.get(key), dict):
            return config[key]  # type: ignore[no-any-return]
    return {}
