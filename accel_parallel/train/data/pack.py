"""Documents to one flat array of token ids per split, written as they come."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from accel_parallel.train.data.held_out import HeldOut
from accel_parallel.train.data.tokens import Tokenizer, pieces

BATCH_CHARS = 500_000
SAY_SECONDS = 5.0

Say = Callable[[str], None]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest of uint16 and uint32 that holds every id."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


class TokenWriter:
    """One split's file; takes at most `limit` tokens."""

    def __init__(self, path: Path, dtype: np.dtype[Any], limit: int | None) -> None:
        self._file = path.open("wb")
        self._dtype = dtype.newbyteorder("<")
        self._sha256 = sha256()
        self.limit = limit
        self.tokens = 0
        self.documents = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def full(self) -> bool:
        return self.limit is not None and self.tokens >= self.limit

    def write(self, ids: list[int], *, last: bool) -> None:
        """Append ids; `last` says that they end a document."""
        if self.full:
            return
        array = np.array(ids if self.limit is None else ids[: self.limit - self.tokens], dtype=self._dtype)
        self._file.write(array.data)
        self._sha256.update(array.data)
        self.tokens += len(array)
        # A document cut short by the limit counts too.
        self.documents += last or self.full

    def summary(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "documents": self.documents, "sha256": self._sha256.hexdigest()}


def val_limit(max_tokens: int | None, fraction: float) -> int | None:
    """Validation tokens in the proportion in which documents are held out."""
    return None if max_tokens is None else math.ceil(max_tokens * fraction / (1 - fraction))


def write_tokens(
    head: list[str],
    rest: Iterable[str],
    rule: HeldOut,
    tokenizer: Tokenizer,
    writers: tuple[TokenWriter, TokenWriter],
    *,
    boundaries: bool,
    say: Say,
) -> None:
    """Tokenise `head` and then `rest`, each document's parts to the training and the validation writer.

    Stops when the training writer is full. Of `head`, which is in memory, the held-out documents are still taken:
    a small bound must not leave the validation split empty.
    """
    train, val = writers
    end = [tokenizer.end_of_text] if boundaries and tokenizer.end_of_text is not None else []
    progress = Progress(train, say)
    for batch in _batches(_parts(head, rest, rule, train, val)):
        encoded = tokenizer.encode_batch([text for text, _, _ in batch])
        for ids, (_, writer, last) in zip(encoded, batch, strict=True):
            writer.write(ids + end if last else ids, last=last)
        progress.report()


Part = tuple[str, TokenWriter, bool]


def _parts(head: list[str], rest: Iterable[str], rule: HeldOut, train: TokenWriter, val: TokenWriter) -> Iterator[Part]:
    """Pieces of text, the writer each goes to, and whether it ends its document; looks at the writers as they fill."""
    for text in head:
        yield from _pieces_of(text, rule, train, val)
    for text in rest:
        if train.full:
            return
        yield from _pieces_of(text, rule, train, val)


def _pieces_of(text: str, rule: HeldOut, train: TokenWriter, val: TokenWriter) -> Iterator[Part]:
    for part, writer in zip(rule.parts(text), (train, val), strict=True):
        done = 0
        for piece in pieces(part) if part else ():
            if writer.full:
                break
            done += len(piece)
            yield piece, writer, done == len(part)


def _batches(parts: Iterable[Part]) -> Iterator[list[Part]]:
    batch: list[Part] = []
    chars = 0
    for part in parts:
        batch.append(part)
        chars += len(part[0])
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


class Progress:
    """A line every few seconds, none for what is quick."""

    def __init__(self, writer: TokenWriter, say: Say) -> None:
        self._writer = writer
        self._say = say
        self._due = time.monotonic() + SAY_SECONDS

    def report(self) -> None:
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + SAY_SECONDS
        of = f" of at most {self._writer.limit / 1e6:.1f} M" if self._writer.limit else ""
        self._say(f"tokenised {self._writer.tokens / 1e6:.1f} M{of} tokens")
