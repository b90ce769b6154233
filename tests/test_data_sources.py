"""What may be named in data.recipe, and what is said when it cannot be read."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accel_parallel.errors import DataError
from accel_parallel.spec import Data
from accel_parallel.train.data import recipe as recipes
from accel_parallel.train.data.documents import read_documents
from accel_parallel.train.data.files import list_files
from accel_parallel.train.data.source import open_source

TEXTS = [f"text {i}" for i in range(5)]


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(name: Path | str, split: str = "train", **keys: Any) -> list[str]:
    return list(read_documents(open_source(Data(recipe=str(name), **keys)), split))


def refused(name: Path | str, **keys: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(name, **keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def jsonl(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def rows(texts: list[str]) -> list[dict[str, Any]]:
    return [{"text": text} for text in texts]


def parquet(path: Path, columns: dict[str, list[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def test_text_files_are_one_document_each(tmp_path: Path) -> None:
    for name, text in {"b.md": "two\r\nlines\n", "a.txt": "one", "sub/c.py": "three", ".hidden.txt": "no"}.items():
        (tmp_path / "t" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "t" / name).write_bytes(text.encode())
    (tmp_path / "t" / "picture.png").write_bytes(b"\x89PNG")
    assert [text.replace("\r", "") for text in read("t")] == ["one", "two\nlines\n", "three"]
    assert read("./t/a.txt") == ["one"]


def test_a_single_file_of_unknown_kind_is_text(tmp_path: Path) -> None:
    (tmp_path / "corpus").write_text("all of it")
    assert read("corpus") == ["all of it"]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", lambda path: path.write_text(jsonl(rows(TEXTS)))),
        ("a.jsonl.gz", lambda path: path.write_bytes(gzip.compress(jsonl(rows(TEXTS)).encode()))),
        ("a.json", lambda path: path.write_text(json.dumps(rows(TEXTS)))),
        ("a.json.gz", lambda path: path.write_bytes(gzip.compress(json.dumps(rows(TEXTS)).encode()))),
        ("a.parquet", lambda path: parquet(path, {"id": [1, 2, 3, 4, 5], "text": TEXTS})),
    ],
)
def test_tables(tmp_path: Path, name: str, write: Callable[[Path], object]) -> None:
    write(tmp_path / name)
    assert read(tmp_path / name) == TEXTS
    (tmp_path / "README.md").write_text("not a document")
    assert read(tmp_path) == TEXTS


def test_files_named_after_splits_are_those_splits(tmp_path: Path) -> None:
    parquet(tmp_path / "data" / "train-00000-of-00001.parquet", {"text": TEXTS})
    parquet(tmp_path / "data" / "validation-00000-of-00001.parquet", {"text": ["held out"]})
    parquet(tmp_path / "data" / "test-00000-of-00001.parquet", {"text": ["never"]})
    assert read(tmp_path / "data") == TEXTS
    assert read(tmp_path / "data", "validation") == ["held out"]


def test_source_code_has_no_splits(tmp_path: Path) -> None:
    for name in ("train.py", "val.py", "test/test_train.py"):
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).write_text(name)
    assert sorted(read("src")) == ["test/test_train.py", "train.py", "val.py"]


def test_text_column(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(jsonl([{"id": 1, "body": "the text"}, {"id": 2, "body": None}, {"id": 3, "body": "  "}]))
    assert read(path) == ["the text"]
    path.write_text(jsonl([{"title": "t", "text": "the text"}]))
    assert read(path) == ["the text"]
    assert read(path, text_column="title") == ["t"]
    message = refused(path, text_column="titel")
    assert "data.text_column 'titel' is not in" in message and "did you mean 'title'?" in message
    assert "its columns are title, text" in message
    path.write_text(jsonl([{"title": "t", "body": "the text", "n": 1}]))
    assert "several columns of strings (title, body)" in refused(path) and "data.text_column" in refused(path)
    path.write_text(jsonl([{"n": 1, "m": [1]}]))
    assert "no column of strings (its columns are n, m; set data.text_column" in refused(path)
    assert "column 'n' of" in refused(path, text_column="n") and "holds int, not text" in refused(path, text_column="n")


def test_a_hub_dataset_on_this_machine(tmp_path: Path) -> None:
    # The code path of a Hub name, with configurations, splits and streaming, on a folder laid out like a Hub dataset.
    hub = tmp_path / "hub"
    for config in ("one", "two"):
        for split in ("train", "validation"):
            parquet(hub / config / f"{split}.parquet", {"text": [f"{config} {split} {i}\n" for i in range(4)]})
    (hub / "README.md").write_text(
        "---\nconfigs:\n"
        + "".join(
            f"- config_name: {config}\n  data_files:\n"
            f"  - {{split: train, path: {config}/train.parquet}}\n"
            f"  - {{split: validation, path: {config}/validation.parquet}}\n"
            for config in ("one", "two")
        )
        + "---\n"
    )
    text = f"source: hub\ndataset: {hub}\nconfig: two\nvalidation_split: validation\n"
    (tmp_path / "mine.yaml").write_text(text)
    assert read("mine.yaml") == [f"two train {i}\n" for i in range(4)]
    assert read("mine.yaml", "validation") == [f"two validation {i}\n" for i in range(4)]
    (tmp_path / "joined.yaml").write_text(text + "document_start: '[02]$'\n")
    assert read("joined.yaml") == ["two train 0\ntwo train 1\n", "two train 2\ntwo train 3\n"]
    (tmp_path / "wrong.yaml").write_text(text.replace("config: two\n", ""))
    assert "config" in refused("wrong.yaml").lower() and "a recipe (data/NAME.yaml) can set config" in refused(
        "wrong.yaml"
    )
    (tmp_path / "wrong.yaml").write_text(text + "train_split: trian\n")
    assert "trian" in refused("wrong.yaml") and "train" in refused("wrong.yaml")
    (tmp_path / "wrong.yaml").write_text(text + "document_start: '['\n")
    assert "document_start '[' is not a regular expression" in refused("wrong.yaml")


def test_only_as_much_of_a_stream_is_read_as_asked_for(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for i in range(3):
        (tmp_path / "d" / f"{i}.jsonl").write_text(jsonl(rows([f"{i} {j}" for j in range(100)])))
    (tmp_path / "d" / "9.jsonl").write_text("broken")
    documents = read_documents(open_source(Data(recipe="d")), "train")
    assert [next(documents) for _ in range(3)] == ["0 0", "0 1", "0 2"]
    with pytest.raises(DataError, match=r"9\.jsonl:1: not valid JSON"):
        list(documents)


def test_a_hub_that_cannot_be_reached() -> None:
    message = refused("some-owner/some-name")
    assert "some-owner/some-name" in message and "name that folder in data.recipe" in message


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("./nowhere", "'nowhere' does not exist (name an existing file or folder"),
        ("nowhere.jsonl", "'nowhere.jsonl' does not exist"),
        ("python_stdlb", "did you mean 'python_stdlib'? (a Hub dataset is written owner/name)"),
        ("tinystories_v2", "is neither a recipe (local_text, python_stdlib, tinystories, wikitext103) nor a file"),
        ("a/b/c", "a Hub dataset is written owner/name"),
        ("", "data.recipe is empty"),
    ],
)
def test_a_name_that_is_nothing(name: str, expected: str) -> None:
    assert expected in refused(name)


def test_a_folder_without_text(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    assert "no file to read in 'd' (files read end in .parquet .jsonl" in refused("d")
    (tmp_path / "d" / "a.txt").write_text("")
    assert "'d' holds only empty files" in refused("d")
    (tmp_path / "d" / "b.jsonl").write_text(jsonl(rows(TEXTS)))
    parquet(tmp_path / "d" / "c.parquet", {"text": TEXTS})
    assert "holds Parquet (c.parquet) and JSONL (b.jsonl) files" in refused("d")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    good = {"a.txt": b"fine", "b.txt": b"abc\xff"}
    for name, content in good.items():
        (tmp_path / name).write_bytes(content)
    message = refused(tmp_path)
    assert f"{tmp_path}/b.txt is not UTF-8 text: byte 3 is 0xff (convert or exclude it)" in message
    (tmp_path / "a.jsonl").write_text(jsonl(rows(TEXTS)) + '{"text": \n')
    assert "a.jsonl:6: not valid JSON" in refused(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(rows(TEXTS * 999)).encode())[:-20])
    assert "a.jsonl.gz cannot be read: " in refused(tmp_path / "a.jsonl.gz")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    assert "a.parquet is not a readable parquet file" in refused(tmp_path / "a.parquet")


def test_a_text_file_too_large_for_memory(tmp_path: Path) -> None:
    with (tmp_path / "big.txt").open("wb") as file:
        file.truncate(3 * 2**30)
    with pytest.raises(
        DataError, match=r"big.txt has 3.0 GiB; a text file is one document of at most 1 GiB \(split it"
    ):
        list_files(tmp_path / "big.txt")


def test_empty_documents_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(jsonl(rows(["", "  \n", "real"])))
    assert read("a.jsonl") == ["real"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("source: hub\ndatset: a/b\n", "key 'dataset' is missing; unknown key 'datset'; did you mean 'dataset'?"),
        ("source: hubb\n", "source is 'hubb'; one of python_stdlib, files, hub; did you mean 'hub'?"),
        ("path: x\n", "source is None; one of python_stdlib, files, hub"),
        ("source: files\npath: 3\n", "path is 3: should be a valid string"),
        ("source: files\npath: x\nsuffixes: [.txt, 1]\n", "suffixes is 1: should be a valid string"),
        ("source: files\npath: x\ndataset: a/b\n", "unknown key 'dataset'"),
        ("source: hub\ndataset: nowhere\n", "dataset 'nowhere' is neither a folder nor a Hub name"),
        ("- a\n", "should hold keys such as source:, not list"),
        ("a: [\n", "is not valid YAML"),
    ],
)
def test_a_wrong_recipe_names_file_and_key(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    message = refused("mine.yaml")
    assert expected in message
    assert "mine.yaml" in message or "nowhere" in message


def test_every_shipped_recipe_is_valid() -> None:
    shipped = sorted(recipes.recipe_folders()[1].glob("*.yaml"))
    assert [path.stem for path in shipped] == ["local_text", "python_stdlib", "tinystories", "wikitext103"]
    assert all(recipes.read_recipe(path).description for path in shipped)


def test_a_recipe_of_the_working_directory_wins(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tinystories.yaml").write_text(
        "source: files\npath: mine\nsuffixes: [.txt]\nexclude: [draft*]\n"
    )
    for name in ("a.txt", "b.md", "drafts/c.txt"):
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text(name)
    assert read("tinystories") == ["a.txt"]


def test_the_standard_library_mixes_topics_and_has_no_tests() -> None:
    source = open_source(Data())
    assert source.files is not None
    names = [path.relative_to(source.files.root).as_posix() for path in source.files.train]
    assert len(names) > 200 and not [
        name for name in names if "/test" in name or "idlelib" in name or "site-packages" in name
    ]
    first = names[: len(names) // 4]
    assert {"json", "email"} <= {name.split("/")[0] for name in names} and first != sorted(first)
    assert source.identity == open_source(Data()).identity
