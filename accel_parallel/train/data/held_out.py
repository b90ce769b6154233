"""Which text is held out for validation: decided by the text itself, not by its order or the tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

MIN_DOCUMENTS = 20
"""With fewer, whole documents are too coarse and the end of each is held out."""

_ALL = 2**64


@dataclass(frozen=True)
class HeldOut:
    """A rule that parts each document into training and validation text."""

    how: Literal["split", "documents", "tails"]
    """By the source's own split, by whole documents, or the end of each document."""
    fraction: float
    below: int = 0
    """`documents`: those whose digest is below are held out."""

    def parts(self, text: str) -> tuple[str, str]:
        """The training and the validation part of a document; one of them is empty except with `tails`."""
        if self.how == "documents":
            return ("", text) if digest(text) < self.below else (text, "")
        if self.how == "tails":
            cut = max(1, int(len(text) * (1 - self.fraction)))
            return text[:cut], text[cut:]
        return text, ""


def digest(text: str) -> int:
    """64 bits that depend on nothing but the text; equal documents always land on the same side."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def choose(head: Sequence[str], fraction: float) -> HeldOut:
    """The rule for a source without a validation split, from its first documents (all of them, if they are few).

    Both sides get at least one document of `head`: left to chance, 5 % of 20 documents are none one time in three.
    """
    digests = {digest(text) for text in head}
    if len(head) < MIN_DOCUMENTS or len(digests) == 1:
        return HeldOut("tails", fraction)
    below = min(max(int(fraction * _ALL), min(digests) + 1), max(digests))
    return HeldOut("documents", fraction, below)
