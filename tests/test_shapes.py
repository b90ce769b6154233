"""Arithmetic on model shapes. That the real model has these parameters is tested in `test_model.py`."""

import subprocess
import sys
from dataclasses import replace

import pytest

from accel_parallel.shapes import ModelShape
from accel_parallel.spec import PRESETS, Model

LLAMA_3_1_8B = ModelShape(
    vocab_size=128_256, num_layers=32, num_heads=32, num_kv_heads=8, hidden_dim=4_096, ffn_dim=14_336,
    seq_len=8_192, tie_embeddings=False,
)  # fmt: skip


def test_llama_3_1_8b() -> None:
    assert LLAMA_3_1_8B.total_parameters == 8_030_261_248
    assert LLAMA_3_1_8B.block_parameters == 218_112_000
    assert LLAMA_3_1_8B.head_dim == 128
    assert Model(preset="llama3_8b").shape == LLAMA_3_1_8B


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("preset", PRESETS)
def test_totals_agree_with_the_names(preset: str, tied: bool) -> None:
    shape = replace(Model(preset=preset).shape, tie_embeddings=tied)
    parameters = shape.parameters()
    assert sum(parameters.values()) == shape.total_parameters
    last = f"blocks.{shape.num_layers - 1}."
    assert sum(size for name, size in parameters.items() if name.startswith(last)) == shape.block_parameters
    assert ("head.weight" in parameters) is not tied
    assert not any(name.startswith(f"blocks.{shape.num_layers}.") for name in parameters)


def test_tiny_puts_exactly_the_blocks_above_a_million() -> None:
    shape = Model(preset="tiny").shape
    parameters = shape.parameters()
    assert shape.block_parameters >= 1_000_000
    assert parameters["token_emb.weight"] < 1_000_000
    assert parameters["head.weight" if not shape.tie_embeddings else "token_emb.weight"] < 1_000_000
    attention = sum(size for name, size in parameters.items() if name.startswith("blocks.0.attn."))
    feed_forward = sum(size for name, size in parameters.items() if name.startswith("blocks.0.ffn."))
    assert max(attention, feed_forward) < 1_000_000


def test_flops_by_hand() -> None:
    # q and o 4 x 4 each, k and v 4 x 2 each, three of 4 x 6: 120 a block; head 10 x 4; attention 12 x 3 x 2 x 2 x 5.
    shape = ModelShape(
        vocab_size=10,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        hidden_dim=4,
        ffn_dim=6,
        seq_len=5,
        tie_embeddings=True,
    )
    assert shape.flops_per_token() == 6 * (3 * 120 + 40) + 12 * 3 * 2 * 2 * 5
    assert replace(shape, tie_embeddings=False).flops_per_token() == shape.flops_per_token()


def test_the_base_floor_imports_nothing_heavy() -> None:
    code = (
        "import sys, accel_parallel.shapes, accel_parallel.hardware\n"
        "ours = {n for n in sys.modules if n.startswith('accel_parallel')}\n"
        "assert ours == {'accel_parallel', 'accel_parallel.shapes', 'accel_parallel.hardware'}, ours\n"
        "assert not {'torch', 'pydantic', 'yaml', 'numpy'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
