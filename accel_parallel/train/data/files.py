"""Files on this machine: which are read, by which builder of `datasets`, and which of them is broken."""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Literal

from accel_parallel.errors import DataError

TABLES = {".parquet": "parquet", ".jsonl": "json", ".jsonl.gz": "json", ".json": "json", ".json.gz": "json"}
TEXTS = (
    *(".txt", ".text", ".txt.gz", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".html", ".xml", ".log"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala", ".js", ".ts"),
    *(".jl", ".r", ".lua", ".rb", ".sh", ".sql", ".yaml", ".yml", ".toml"),
)
KNOWN = (*TABLES, *TEXTS)
MAX_TEXT_FILE = 2**30
"""A text file is one document and is held in memory; larger ones are refused."""

Builder = Literal["text", "json", "parquet"]
_SPLIT_WORDS = {
    "train": "train",
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "eval"), "test"),
}


@dataclass(frozen=True)
class LocalFiles:
    """Files of one kind, in the order in which they are read."""

    root: Path
    builder: Builder
    train: tuple[Path, ...]
    validation: tuple[Path, ...] = ()

    def fingerprint(self) -> list[list[object]]:
        """Split, relative path, size and time of change of each file: what decides the content, without reading it."""
        rows: list[list[object]] = []
        for split, paths in (("train", self.train), ("validation", self.validation)):
            for path in paths:
                stat = path.stat()
                rows.append([split, path.relative_to(self.root).as_posix(), stat.st_size, stat.st_mtime_ns])
        return rows


def suffix_of(path: Path, known: Iterable[str] = KNOWN) -> str | None:
    """The longest of the known suffixes that the name ends with."""
    return max((suffix for suffix in known if path.name.lower().endswith(suffix)), key=len, default=None)


def list_files(path: Path, suffixes: Iterable[str] | None = None, exclude: Iterable[str] = ()) -> LocalFiles:
    """The files to read at `path`.

    A folder with Parquet or JSONL files is a table, whatever lies beside them; else its text files are read, else
    its JSON.
    Raises DataError if the path does not exist, holds nothing to read, or holds two kinds of tables.
    """
    if not path.exists():
        raise DataError(
            f"data: {str(path)!r} does not exist", hint="name an existing file or folder of text, JSONL or Parquet"
        )
    known = tuple(suffixes) if suffixes else KNOWN
    if path.is_file():
        found, root = [path], path.parent
    else:
        found, root = [file for file in walk(path, exclude) if suffix_of(file, known)], path
    if not found:
        raise DataError(f"data: no file to read in {str(path)!r}", hint=f"files read end in {' '.join(known)}")
    filled = [file for file in found if file.stat().st_size]
    if not filled:
        raise DataError(f"data: {str(path)!r} holds only empty files", hint="put text into them")
    builder, chosen = _one_kind(filled, path)
    for file in chosen:
        if builder == "text" and file.stat().st_size > MAX_TEXT_FILE:
            raise DataError(
                f"data: {file} has {file.stat().st_size / 2**30:.1f} GiB; "
                f"a text file is one document of at most {MAX_TEXT_FILE / 2**30:.0f} GiB",
                hint="split it, or write its documents as JSONL or Parquet rows",
            )
    train, validation = _by_split(chosen, root)
    return LocalFiles(root, builder, train, validation)


def walk(folder: Path, exclude: Iterable[str] = ()) -> Iterator[Path]:
    """Files below a folder in the order of their names, without hidden ones, `__pycache__` and excluded names."""
    patterns = tuple(exclude)
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or entry.name == "__pycache__" or any(fnmatch(entry.name, p) for p in patterns):
            continue
        if entry.is_dir():
            yield from walk(entry, patterns)
        elif entry.is_file():
            yield entry


def _one_kind(files: list[Path], path: Path) -> tuple[Builder, list[Path]]:
    tables = {"parquet": [f for f in files if suffix_of(f) == ".parquet"]}
    tables["json"] = [f for f in files if suffix_of(f) in (".jsonl", ".jsonl.gz")]
    if tables["parquet"] and tables["json"]:
        raise DataError(
            f"data: {str(path)!r} holds Parquet ({tables['parquet'][0].name}) "
            f"and JSONL ({tables['json'][0].name}) files",
            hint="name one file or subfolder, or write a recipe with suffixes: [.parquet] (see local_text)",
        )
    if tables["parquet"]:
        return "parquet", tables["parquet"]
    plain_json = [f for f in files if suffix_of(f) in (".json", ".json.gz")]
    if tables["json"]:
        return "json", sorted([*tables["json"], *plain_json])
    texts = [f for f in files if f not in set(plain_json)]
    if plain_json and all(f.stem.upper() in ("README", "LICENSE") for f in texts):
        return "json", plain_json
    return "text", texts


def _by_split(files: list[Path], root: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Training and validation files where the names say so (`train-0001.parquet`, `val.txt`), else all for training."""
    splits = {file: _split_of(file, root) for file in files}
    if "train" not in splits.values():
        return tuple(files), ()
    train = tuple(file for file, split in splits.items() if split in ("train", None))
    return train, tuple(file for file, split in splits.items() if split == "validation")


def _split_of(file: Path, root: Path) -> str | None:
    # Source code has modules called train.py and folders called test: no split is meant.
    if suffix_of(file) not in (*TABLES, ".txt", ".txt.gz"):
        return None
    words = re.split(r"[^a-z]+", file.relative_to(root).as_posix().lower())
    return next((_SPLIT_WORDS[word] for word in reversed(words) if word in _SPLIT_WORDS), None)


def find_broken(files: LocalFiles, split: str) -> DataError | None:
    """Read the files one by one to say which cannot be read; slow, so only after reading them all has failed."""
    for path in files.validation if split == "validation" else files.train:
        try:
            _check(path, files.builder)
        except UnicodeDecodeError as error:
            where = f"byte {error.start:,} is 0x{error.object[error.start]:02x}"
            return DataError(f"data: {path} is not UTF-8 text: {where}", hint="convert or exclude it")
        except json.JSONDecodeError as error:
            return DataError(
                f"data: {path}:{error.lineno}: not valid JSON: {error.msg}", hint="repair the line or exclude the file"
            )
        except (OSError, EOFError, zlib.error) as error:
            return DataError(f"data: {path} cannot be read: {getattr(error, 'strerror', None) or error}")
        except ValueError as error:
            return DataError(f"data: {path} is not a readable {files.builder} file: {str(error).splitlines()[0]}")
    return None


def _check(path: Path, builder: Builder) -> None:
    if builder == "parquet":
        import pyarrow.parquet

        for _ in pyarrow.parquet.ParquetFile(path).iter_batches():
            pass
        return
    if builder == "text":
        with _open(path) as file:
            file.read().decode("utf-8")
        return
    with _open(path) as file:
        if suffix_of(path) in (".json", ".json.gz"):
            try:
                json.loads(file.read())
                return
            except json.JSONDecodeError as error:
                if "Extra data" not in error.msg:
                    raise
            file.seek(0)
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    json.loads(line)
                except json.JSONDecodeError as error:
                    error.lineno = number
                    raise


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb")  # type: ignore[return-value]
