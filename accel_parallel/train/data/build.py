"""`prepare`: from `spec.data` to packed tokens, once per content."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accel_parallel.errors import DataError
from accel_parallel.spec import Data
from accel_parallel.train.data.cache import (
    FORMAT,
    building,
    entries,
    entry_folder,
    locked,
    read_manifest,
    wait_for,
    write_manifest,
)
from accel_parallel.train.data.documents import read_documents
from accel_parallel.train.data.held_out import MIN_DOCUMENTS, HeldOut, choose
from accel_parallel.train.data.pack import Say, TokenWriter, token_dtype, val_limit, write_tokens
from accel_parallel.train.data.source import Source, open_source
from accel_parallel.train.data.tokens import (
    BYTE_BPE,
    ByteBpe,
    Tokenizer,
    check_vocab_size,
    load_tokenizer,
    open_tokenizer,
    sample,
    tokenizer_identity,
)

SAMPLE_CHARS = 10_000_000
"""The tokenizer learns from so much of the text; more changes its merges little and costs seconds per 5 MB."""
MIN_SAMPLE_CHARS = 500_000
CHARS_PER_TOKEN = 6
"""A generous guess, so that a small `max_tokens` reads little."""


@dataclass(frozen=True)
class TokenData:
    """A complete entry of the token cache."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """Equal wherever the tokens are equal, whatever the paths and times of the files they came from."""
        return str(self.manifest["fingerprint"])

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer, at most the model's `vocab_size`; every id is below it."""
        return int(self.manifest["tokenizer"]["vocab_size"])

    @property
    def end_of_text(self) -> int | None:
        """The id that ends a document."""
        value: int | None = self.manifest["tokenizer"]["end_of_text"]
        return value

    @property
    def tokenizer_folder(self) -> Path:
        """What `AutoTokenizer.from_pretrained` reads."""
        return self.folder / "tokenizer"

    @cached_property
    def train(self) -> NDArray[Any]:
        """Training tokens, memory-mapped."""
        return self._open("train")

    @cached_property
    def val(self) -> NDArray[Any]:
        """Held-out tokens, memory-mapped."""
        return self._open("val")

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        return self._tokenizer.encode_batch([text])[0]

    def decode(self, ids: list[int]) -> str:
        """The text of ids."""
        return self._tokenizer.decode(ids)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return open_tokenizer(self.tokenizer_folder, self.manifest["tokenizer"]["name"])

    def _open(self, split: str) -> NDArray[Any]:
        dtype = np.dtype(self.manifest["dtype"]).newbyteorder("<")
        return np.memmap(self.folder / f"{split}.bin", dtype=dtype, mode="r")


def to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def prepare(data: Data, vocab_size: int, *, leader: bool = True, say: Callable[[str], None] = to_stderr) -> TokenData:
    """Tokens of the text that `data` names, from the cache or, by the leader, made now.

    Not a collective: on each machine one process is the leader, the others wait for its files and say so.
    Raises DataError for everything that is wrong with the text, the recipe, the tokenizer or the disk.
    """
    check_vocab_size(data.tokenizer, vocab_size)
    source = open_source(data)
    folder = entry_folder(_identity(data, vocab_size, source))
    manifest = read_manifest(folder)
    if manifest is None and leader:
        with locked(folder, say):
            manifest = read_manifest(folder)
            if manifest is None:
                manifest = _build(data, vocab_size, source, folder, say)
    elif manifest is None:
        manifest = wait_for(folder, say)
    return TokenData(folder, manifest)


def find_tokens(fingerprint: str, tokenizer: str | None) -> TokenData | None:
    """The cached tokens of this fingerprint that `data.tokenizer` made, whatever became of the text since."""
    for folder, manifest in entries():
        if manifest.get("fingerprint") == fingerprint and manifest["tokenizer"]["name"] == tokenizer:
            return TokenData(folder, manifest)
    return None


def _identity(data: Data, vocab_size: int, source: Source) -> dict[str, Any]:
    return {
        "source": source.identity,
        "tokenizer": tokenizer_identity(data.tokenizer),
        "vocab_size": vocab_size,
        "max_tokens": data.max_tokens,
        "val_fraction": data.val_fraction,
        "document_boundaries": data.document_boundaries,
    }


def _build(data: Data, vocab_size: int, source: Source, folder: Path, say: Say) -> dict[str, Any]:
    say(f"reading {source.name}")
    documents = read_documents(source, "train")
    head = _head(documents, _sample_chars(data))
    if not head:
        raise DataError(f"data: {source.name} holds no text: every document is empty", hint="name a source with text")
    named_split = "validation" in source.splits
    rule = HeldOut("split", data.val_fraction) if named_split else choose(head, data.val_fraction)
    tokenizer = _tokenizer(data, vocab_size, head, rule, say)
    dtype = token_dtype(tokenizer.size)
    with building(folder) as temporary:
        with (
            TokenWriter(temporary / "train.bin", dtype, data.max_tokens) as train,
            TokenWriter(temporary / "val.bin", dtype, val_limit(data.max_tokens, data.val_fraction)) as val,
        ):
            boundaries = data.document_boundaries
            write_tokens(head, documents, rule, tokenizer, (train, val), boundaries=boundaries, say=say)
            if named_split:
                held_out = read_documents(source, "validation")
                write_tokens([], held_out, rule, tokenizer, (val, val), boundaries=boundaries, say=say)
        _check_enough(source, train, val)
        manifest = {
            "format": FORMAT,
            "source": source.name,
            "held_out": rule.how,
            "dtype": dtype.name,
            "train": train.summary(),
            "val": val.summary(),
            "tokenizer": {"name": data.tokenizer, "vocab_size": tokenizer.size, "end_of_text": tokenizer.end_of_text},
            "data": data.model_dump(mode="json"),
        }
        manifest["fingerprint"] = _fingerprint(manifest)
        tokenizer.save(temporary / "tokenizer")
        write_manifest(temporary, manifest)
    say(
        f"{train.tokens:,} training and {val.tokens:,} held-out tokens of {train.documents + val.documents:,} documents"
    )
    return manifest


def _sample_chars(data: Data) -> int:
    """How many characters to hold in memory before deciding what is held out, and for a tokenizer to learn from.

    The same for every tokenizer: with another one, no text may move from training to validation.
    """
    wanted = SAMPLE_CHARS if data.max_tokens is None else data.max_tokens * CHARS_PER_TOKEN
    return min(SAMPLE_CHARS, max(MIN_SAMPLE_CHARS, wanted))


def _head(documents: Iterator[str], chars: int) -> list[str]:
    """The first documents: enough to choose what is held out, and to train a tokenizer."""
    head: list[str] = []
    while chars > 0 or len(head) < MIN_DOCUMENTS:
        text = next(documents, None)
        if text is None:
            break
        head.append(text)
        chars -= len(text)
    return head


def _tokenizer(data: Data, vocab_size: int, head: list[str], rule: HeldOut, say: Say) -> Tokenizer:
    if data.tokenizer != BYTE_BPE:
        say(f"loading the tokenizer {data.tokenizer}")
        return load_tokenizer(data.tokenizer, vocab_size, need_end_of_text=data.document_boundaries)
    texts = sample([rule.parts(text)[0] for text in head], SAMPLE_CHARS)
    megabytes = sum(map(len, texts)) / 1e6
    say(f"training a {vocab_size:,}-token byte-level BPE on {megabytes:.1f} MB of text")
    return ByteBpe.train(texts, vocab_size)


def _check_enough(source: Source, train: TokenWriter, val: TokenWriter) -> None:
    for split, writer in (("training", train), ("held-out", val)):
        if writer.tokens < 2:
            raise DataError(
                f"data: {source.name} gives {writer.tokens} {split} tokens; at least 2 are needed",
                hint="use more text, or raise data.max_tokens",
            )


def _fingerprint(manifest: dict[str, Any]) -> str:
    parts = (
        manifest["dtype"],
        manifest["tokenizer"]["vocab_size"],
        manifest["train"]["sha256"],
        manifest["val"]["sha256"],
    )
    return sha256(repr(parts).encode()).hexdigest()
