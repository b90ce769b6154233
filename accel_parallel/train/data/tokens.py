"""Tokenizers: a byte-level BPE trained on the text, or one from `transformers`."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from accel_parallel.errors import DataError
from accel_parallel.train.data.files import walk

BYTE_BPE = "byte_bpe"
END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB = 256 + 1
"""Every byte and the end of text."""
PIECE_CHARS = 200_000
"""Longer documents are tokenised in pieces, which bounds memory and keeps all cores busy."""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    size: int
    """Ids are below it."""
    end_of_text: int | None

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text; special tokens that happen to be spelt out in it are ordinary text."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; those that are no token are left out."""

    def save(self, folder: Path) -> None:
        """Write what `open_tokenizer` and `AutoTokenizer` read."""


class ByteBpe:
    """A byte-level BPE of the `tokenizers` library."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True
        self.size: int = tokenizer.get_vocab_size()
        self.end_of_text: int | None = tokenizer.token_to_id(END_OF_TEXT)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "ByteBpe":
        """Learn at most `vocab_size` tokens; a text with few distinct words yields fewer."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def open(cls, folder: Path) -> "ByteBpe":
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")))

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([token for token in ids if token < self.size], skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        folder.mkdir()
        self._tokenizer.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


class Auto:
    """A tokenizer of `transformers`."""

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        # Not len(): ids may have holes, and the embedding needs a row for the largest.
        self.size: int = max(self._tokenizer.get_vocab().values()) + 1
        self.end_of_text: int | None = self._tokenizer.eos_token_id

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        options = {
            "add_special_tokens": False,
            "split_special_tokens": True,
            "return_attention_mask": False,
            "verbose": False,
        }
        return self._tokenizer(texts, **options)["input_ids"]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([token for token in ids if token < self.size], skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(str(folder))


def open_tokenizer(folder: Path, name: str) -> Tokenizer:
    """The tokenizer that `save` wrote; `name` is what the specification called it."""
    return ByteBpe.open(folder) if name == BYTE_BPE else Auto(str(folder))


def load_tokenizer(name: str, vocab_size: int, *, need_end_of_text: bool) -> Tokenizer:
    """An AutoTokenizer by its Hub name or folder.

    Raises DataError if it cannot be loaded, has more tokens than the model, or lacks the end-of-text token it needs.
    """
    try:
        folder = Path(name).expanduser()
        tokenizer = Auto(str(folder) if folder.is_dir() else name)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise DataError(
                f"data.tokenizer {name!r} brings Python code of its own, which is never run",
                hint="name a tokenizer that transformers has a class for, such as a folder with tokenizer.json alone",
            ) from None
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        hint = f"an AutoTokenizer's Hub name, or a folder with tokenizer.json; {BYTE_BPE} trains one on your text"
        raise DataError(f"data.tokenizer {name!r} cannot be loaded: {reason}", hint=hint) from error
    if tokenizer.size > vocab_size:
        raise DataError(
            f"data.tokenizer {name!r} has {tokenizer.size:,} tokens, more than model.vocab_size {vocab_size:,}",
            hint=f"set model.vocab_size to {tokenizer.size} or more",
        )
    if need_end_of_text and tokenizer.end_of_text is None:
        raise DataError(
            f"data.tokenizer {name!r} has no end-of-text token", hint="set data.document_boundaries to false"
        )
    return tokenizer


def tokenizer_identity(name: str) -> list[Any]:
    """What decides a tokenizer, known without loading it: its name, or the files of a folder."""
    folder = Path(name).expanduser()
    if name == BYTE_BPE or not folder.is_dir():
        return [name]
    return [
        [file.relative_to(folder).as_posix(), file.stat().st_size, file.stat().st_mtime_ns] for file in walk(folder)
    ]


def check_vocab_size(name: str, vocab_size: int) -> None:
    """Raises DataError if a byte-level BPE cannot be that small."""
    if name == BYTE_BPE and vocab_size < MIN_VOCAB:
        raise DataError(
            f"model.vocab_size {vocab_size} is below the {MIN_VOCAB} tokens of {BYTE_BPE}",
            hint=f"256 bytes and the end of text; set model.vocab_size to {MIN_VOCAB} or more",
        )


def pieces(text: str) -> Iterator[str]:
    """A long document in pieces that end at a line's end where there is one; together they are the document."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        cut = text.rfind("\n", start, start + PIECE_CHARS) + 1 or start + PIECE_CHARS
        yield text[start:cut]
        start = cut
    yield text[start:]


def sample(texts: Sequence[str], max_chars: int) -> list[str]:
    """Pieces from the beginning of `texts`, up to about `max_chars` characters."""
    chosen: list[str] = []
    for piece in (piece for text in texts for piece in pieces(text)):
        if max_chars <= 0:
            break
        chosen.append(piece[:max_chars])
        max_chars -= len(piece)
    return chosen
