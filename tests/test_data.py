"""From text to packed tokens: what is in them, what is held out, what the cache promises."""

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel_parallel.errors import DataError
from accel_parallel.spec import Data
from accel_parallel.train import prepare as command
from accel_parallel.train.data import TokenData, build, pack, prepare, tokens
from accel_parallel.train.data.held_out import MIN_DOCUMENTS, choose, digest

VOCAB = 300
END = tokens.END_OF_TEXT


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("ACCEL_PARALLEL_CACHE", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def documents(count: int) -> list[str]:
    return [f"document {i} says {'so ' * (i % 7)}and ends.\n" for i in range(count)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def make(path: Path, vocab_size: int = VOCAB, **keys: Any) -> TokenData:
    return prepare(Data(recipe=str(path), **keys), vocab_size, say=lambda line: None)


def split_documents(data: TokenData, split: str) -> list[str]:
    text = data.decode(getattr(data, split).tolist())
    assert text.endswith(END)
    return text.split(END)[:-1]


def test_packing_is_the_documents_joined_by_end_of_text(tmp_path: Path) -> None:
    texts = documents(60)
    data = make(write_jsonl(tmp_path / "a.jsonl", texts), max_tokens=None)
    train, val = split_documents(data, "train"), split_documents(data, "val")
    assert set(train) | set(val) == set(texts) and not set(train) & set(val)
    # The source's order is kept.
    assert train == [text for text in texts if text in set(train)]
    assert data.manifest["held_out"] == "documents"
    assert data.manifest["train"]["documents"] == len(train)
    assert data.manifest["train"]["tokens"] == len(data.train)
    assert data.train.dtype == np.uint16 and int(data.train.max()) < data.vocab_size <= VOCAB


def test_without_boundaries_documents_follow_each_other(tmp_path: Path) -> None:
    texts = documents(40)
    data = make(write_jsonl(tmp_path / "a.jsonl", texts), document_boundaries=False)
    train = data.decode(data.train.tolist())
    assert END not in train and len(train) + len(data.decode(data.val.tolist())) == sum(map(len, texts))


def test_end_of_text_spelt_out_in_a_document_is_text(tmp_path: Path) -> None:
    texts = [f"{i} {END} in the middle" for i in range(30)]
    data = make(write_jsonl(tmp_path / "a.jsonl", texts))
    both = [*data.train.tolist(), *data.val.tolist()]
    assert both.count(data.end_of_text) == 30
    assert data.decode(data.encode(texts[0])) == texts[0] and data.end_of_text not in data.encode(texts[0])


def test_long_documents_are_packed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "PIECE_CHARS", 50)
    texts = ["".join(f"line {i} of {name}\n" for i in range(40)) + "x" * 120 for name in map(str, range(25))]
    data = make(write_jsonl(tmp_path / "a.jsonl", texts))
    assert sorted(split_documents(data, "train") + split_documents(data, "val")) == sorted(texts)


def test_what_is_held_out_depends_on_neither_order_nor_tokenizer(tmp_path: Path) -> None:
    texts = documents(200)
    one = make(write_jsonl(tmp_path / "a.jsonl", texts))
    two = make(write_jsonl(tmp_path / "b.jsonl", texts[::-1]), vocab_size=280)
    assert sorted(split_documents(one, "val")) == sorted(split_documents(two, "val"))
    assert 2 <= one.manifest["val"]["documents"] <= 25


def test_another_tokenizer_holds_out_the_same_text(tmp_path: Path) -> None:
    """Also where chance puts none of the first documents below the threshold."""
    held_out = [text for text in documents(400) if digest(text) < 0.02 * 2**64]
    first = [text for text in documents(400) if text not in held_out][:MIN_DOCUMENTS]
    rest = [text for text in documents(400) if text not in first]
    source = write_jsonl(tmp_path / "a.jsonl", first + rest)
    one = make(source, val_fraction=0.02)
    two = make(source, val_fraction=0.02, tokenizer=str(one.tokenizer_folder))
    assert sorted(split_documents(one, "val")) == sorted(split_documents(two, "val")) == sorted(held_out)


@pytest.mark.parametrize("fraction", [1e-6, 0.999])
def test_both_splits_get_a_document(fraction: float) -> None:
    texts = documents(20)
    rule = choose(texts, fraction)
    sides = [bool(rule.parts(text)[0]) for text in texts]
    assert set(sides) == {True, False}


def test_few_documents_hold_out_their_ends(tmp_path: Path) -> None:
    texts = [f"{name} " * 100 for name in ("alpha", "beta", "gamma")]
    data = make(write_jsonl(tmp_path / "a.jsonl", texts), val_fraction=0.25)
    assert data.manifest["held_out"] == "tails"
    train, val = split_documents(data, "train"), split_documents(data, "val")
    assert [a + b for a, b in zip(train, val, strict=True)] == texts
    assert [len(b) for b in val] == [len(text) // 4 for text in texts]


def test_equal_documents_are_held_out_by_their_ends() -> None:
    assert choose(["same"] * 50, 0.05).how == "tails"


def test_the_tokenizer_never_sees_held_out_text(tmp_path: Path) -> None:
    # Distinct words of letters only: a byte-level BPE never joins letters and digits.
    letters = str.maketrans("0123456789", "ghijklmnop")
    words = [sha256(str(i).encode()).hexdigest()[:8].translate(letters) for i in range(40)]
    texts = [f"{word} " * 50 for word in words]
    data = make(write_jsonl(tmp_path / "a.jsonl", texts), vocab_size=2000, val_fraction=0.2)
    lengths = {word: len(data.encode(f" {word}")) for word in words}
    held_out = {text.split()[0] for text in split_documents(data, "val")}
    assert {lengths[word] for word in words if word not in held_out} == {1}
    assert held_out and min(lengths[word] for word in held_out) > 1


def test_max_tokens_bounds_both_splits(tmp_path: Path) -> None:
    texts = documents(400)
    data = make(write_jsonl(tmp_path / "a.jsonl", texts), max_tokens=1000, val_fraction=0.2)
    assert len(data.train) == 1000
    assert len(data.val) == 250
    assert data.manifest["train"]["documents"] + data.manifest["val"]["documents"] < 400


def test_no_more_of_the_source_is_read_than_the_bound_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "MIN_SAMPLE_CHARS", 100)
    monkeypatch.setattr(pack, "BATCH_CHARS", 100)
    write_jsonl(tmp_path / "d" / "a.jsonl", documents(100))
    (tmp_path / "d" / "b.jsonl").write_text("broken")
    assert len(make(tmp_path / "d", max_tokens=300).train) == 300
    with pytest.raises(DataError, match=r"b\.jsonl:1: not valid JSON"):
        make(tmp_path / "d", max_tokens=30_000)


def test_a_small_bound_still_holds_something_out(tmp_path: Path) -> None:
    data = make(write_jsonl(tmp_path / "a.jsonl", documents(400)), max_tokens=100)
    assert len(data.train) == 100 and len(data.val) == 6


def test_dtype_follows_the_vocabulary() -> None:
    assert pack.token_dtype(65536) == np.uint16 and pack.token_dtype(65537) == np.uint32


def test_equal_tokens_have_equal_fingerprints(tmp_path: Path) -> None:
    texts = documents(30)
    one = make(write_jsonl(tmp_path / "a.jsonl", texts))
    two = make(write_jsonl(tmp_path / "elsewhere" / "b.jsonl", texts))
    three = make(write_jsonl(tmp_path / "c.jsonl", [*texts, "one more"]))
    assert one.folder != two.folder and one.fingerprint == two.fingerprint != three.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 50},
        {"val_fraction": 0.1},
        {"document_boundaries": False},
        {"text_column": "text"},
        {"vocab_size": 290},
    ],
)
def test_what_decides_the_content_decides_the_entry(tmp_path: Path, change: dict[str, Any]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", documents(30))
    assert make(path).folder == make(path).folder != make(path, **change).folder


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", documents(30))
    before = make(path)
    stat = path.stat()
    write_jsonl(path, [text.replace("says", "sang") for text in documents(30)])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))
    assert make(path).fingerprint != before.fingerprint


def test_a_damaged_entry_is_made_again(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", documents(30))
    first = make(path)
    whole = (first.folder / "train.bin").read_bytes()
    (first.folder / "train.bin").write_bytes(whole[:-2])
    assert (make(path).folder / "train.bin").read_bytes() == whole
    (first.folder / "manifest.json").unlink()
    assert make(path).fingerprint == first.fingerprint


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", documents(30))
    monkeypatch.delenv("ACCEL_PARALLEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert make(path).folder.is_relative_to(tmp_path / "xdg" / "accel_parallel")


def test_a_cache_that_cannot_be_written_names_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", documents(30))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ACCEL_PARALLEL_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cannot write the token cache .*file/tokens: .*ACCEL_PARALLEL_CACHE"):
        make(path)


def test_a_full_disk_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    def full(self: object, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    path = write_jsonl(tmp_path / "a.jsonl", documents(30))
    monkeypatch.setattr(tokens.ByteBpe, "save", full)
    with pytest.raises(DataError, match=r"No space left on device .*ACCEL_PARALLEL_CACHE"):
        make(path)
    assert [entry.suffix for entry in (cache / "tokens").iterdir()] in ([], [".lock"])


def test_a_vocabulary_below_the_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model.vocab_size 256 is below the 257 tokens"):
        make(write_jsonl(tmp_path / "a.jsonl", documents(30)), vocab_size=256)


def test_few_words_give_fewer_tokens(tmp_path: Path) -> None:
    data = make(write_jsonl(tmp_path / "a.jsonl", documents(30)), vocab_size=5000)
    assert 257 < data.vocab_size < 1000
    assert data.decode([*data.encode("so"), 4999]) == "so"


def test_a_tokenizer_of_transformers(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", documents(30))
    own = make(path)
    folder = str(own.tokenizer_folder)
    data = make(path, tokenizer=folder)
    assert data.vocab_size == own.vocab_size and data.fingerprint == own.fingerprint
    # Read back from the cache, as a later process does.
    again = make(path, tokenizer=folder)
    assert again.decode(again.encode(f"says {END}")) == f"says {END}"
    assert again.end_of_text not in again.encode(END)
    with pytest.raises(DataError, match=rf"'{folder}' has {own.vocab_size} tokens, more than model.vocab_size 260"):
        make(path, vocab_size=260, tokenizer=folder)
    config = Path(folder) / "tokenizer_config.json"
    config.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(DataError, match=r"no end-of-text token \(set data.document_boundaries to false\)"):
        make(path, tokenizer=folder)
    assert make(path, tokenizer=folder, document_boundaries=False).end_of_text is None


@pytest.mark.parametrize("name", ["no-such/tokenizer", "./nowhere"])
def test_a_tokenizer_that_cannot_be_loaded(tmp_path: Path, name: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", documents(30))
    with pytest.raises(DataError, match=rf"data.tokenizer '{name}' cannot be loaded: .*byte_bpe trains one") as error:
        make(path, tokenizer=name)
    assert "\n" not in str(error.value)


def test_the_standard_library_is_the_default(cache: Path) -> None:
    lines: list[str] = []
    data = prepare(Data(max_tokens=20_000), 512, say=lines.append)
    assert data.vocab_size == 512 and len(data.train) == 20_000 and len(data.val) > 500
    assert "training a 512-token byte-level BPE on 0.5 MB of text" in "\n".join(lines)
    assert "import " in data.decode(data.train.tolist())


def test_the_command_prints_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", documents(30))
    arguments = ["--set", f"data.recipe={path}", "--set", "model.vocab_size=300"]
    assert command.main(arguments) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == ["source", "train", "held", "vocabulary", "cache"]
    assert str(cache) in out and " tokens in " in out
    assert command.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cache"].startswith(str(cache))
    assert command.main(["--set", "data.recipe=nowhere.txt"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "'nowhere.txt' does not exist" in captured.err
