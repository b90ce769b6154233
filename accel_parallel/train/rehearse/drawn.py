"""Tokens that are drawn, not read: a rehearsal needs no text, and its numbers are the same wherever it runs."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from accel_parallel.spec import RunSpec
from accel_parallel.train.data import TokenData

HELD_OUT_SEQUENCES = 1


def draw_tokens(folder: Path, spec: RunSpec) -> TokenData:
    """Write as many tokens as all steps of `spec` read, uniform; every second one follows from the one before."""
    name = f"drawn with seed {spec.training.seed}"
    folder.mkdir()
    for split, sequences, seed in (
        ("train", spec.training.steps * spec.training.batch_size, spec.training.seed),
        ("val", HELD_OUT_SEQUENCES, spec.training.seed + 1),
    ):
        _draw(spec, sequences, seed).astype("<u4").tofile(folder / f"{split}.bin")
    tokenizer = {"name": name, "vocab_size": spec.model.vocab_size, "end_of_text": None}
    return TokenData(folder, {"fingerprint": name, "dtype": "u4", "tokenizer": tokenizer})


def _draw(spec: RunSpec, sequences: int, seed: int) -> NDArray[np.int64]:
    """(sequences x T + 1,)"""
    vocab = spec.model.vocab_size
    tokens = np.random.default_rng(seed).integers(vocab, size=sequences * spec.model.seq_len + 1)
    followers = tokens[1::2]
    followers[:] = (tokens[::2][: len(followers)] * 7 + 3) % vocab
    return tokens
