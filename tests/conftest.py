"""Fixtures that everything shares. No test may reach for the network."""

import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

TOY = (
    "model.vocab_size=320",
    "model.num_layers=3",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.hidden_dim=32",
    "model.ffn_dim=64",
    "model.seq_len=32",
    "fsdp.min_num_params=1000",
    "training.batch_size=8",
    "training.steps=20",
    "training.warmup_steps=3",
    "training.lr=1e-3",
    "training.min_lr=1e-4",
    "checkpoint.every=0",
    "logging.every=1",
    "logging.eval_every=0",
    "logging.eval_batches=2",
)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small English-like text files."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def write_corpus(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    subjects = ("the loop", "a shard", "every rank", "one gradient", "the optimizer", "this checkpoint")
    verbs = ("reads", "gathers", "reduces", "keeps", "writes", "forgets")
    for number in range(40):
        sentences = [
            f"{subjects[(number * 7 + i) % 6]} {verbs[(number + i * i) % 6]} {(number * 31 + i * 17) % 97} tokens."
            for i in range(9)
        ]
        (folder / f"{number:02d}.txt").write_text("\n".join(sentences) + "\n")
    return folder


@pytest.fixture(scope="session", autouse=True)
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All tests share one token cache that is not the user's."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["ACCEL_PARALLEL_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def toy(corpus: Path) -> list[str]:
    """A model of some ten thousand parameters on the small corpus, every step reported."""
    return [*TOY, f"data.recipe={corpus}"]
