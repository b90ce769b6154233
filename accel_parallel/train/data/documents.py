"""Reading documents through `datasets`, one by one, every failure told in one line."""

import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

from accel_parallel.errors import DataError
from accel_parallel.suggest import did_you_mean
from accel_parallel.train.data.files import find_broken
from accel_parallel.train.data.source import Source

PEEKED_ROWS = 64


def read_documents(source: Source, split: str) -> Iterator[str]:
    """The documents of a split (`train` or `validation`) in the source's order; empty ones are left out.

    Raises DataError if the source cannot be reached or read, or its text column cannot be found.
    """
    rows = _guarded(source, split)
    peeked = list(islice(rows, PEEKED_ROWS))
    column = text_column(peeked, source) if peeked else ""
    texts: Iterator[str] = (_text(row, column, source) for row in chain(peeked, rows))
    if source.document_start is not None:
        texts = join_rows(texts, re.compile(source.document_start))
    return (text for text in texts if text.strip())


def _guarded(source: Source, split: str) -> Iterator[dict[str, Any]]:
    """Rows of the dataset; whatever `datasets` raises becomes a DataError."""
    try:
        yield from _load(source, split)
    except DataError:
        raise
    except Exception as error:
        raise _explain(error, source, split) from error


def _load(source: Source, split: str) -> Iterable[dict[str, Any]]:
    import datasets

    if source.streaming:
        datasets.disable_progress_bars()
    # What it logs about a broken file is said in our error.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets.load_dataset(
        **source.load, split=source.splits[split], streaming=source.streaming, trust_remote_code=False
    )


def text_column(rows: list[dict[str, Any]], source: Source) -> str:
    """The column that holds the text, judged by the first rows.

    Raises DataError, listing the columns, if the one asked for is missing or none stands out.
    """
    columns = list(rows[0])
    asked = source.text_column
    if asked is not None:
        if asked not in columns:
            raise DataError(
                f"data.text_column {asked!r} is not in {source.name}{did_you_mean(asked, columns)}",
                hint=f"its columns are {', '.join(columns)}",
            )
        return asked
    values = {name: [row[name] for row in rows if row.get(name) is not None] for name in columns}
    strings = [name for name in columns if values[name] and all(isinstance(value, str) for value in values[name])]
    if "text" in strings:
        return "text"
    if len(strings) != 1:
        found = f"several columns of strings ({', '.join(strings)})" if strings else "no column of strings"
        raise DataError(
            f"{source.name} has {found}",
            hint=f"its columns are {', '.join(columns)}; set data.text_column to the one that holds the text",
        )
    return strings[0]


def _text(row: dict[str, Any], column: str, source: Source) -> str:
    value = row.get(column)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(
            f"column {column!r} of {source.name} holds {type(value).__name__}, not text",
            hint=f"its columns are {', '.join(row)}; set data.text_column to the one that holds the text",
        )
    return value


def join_rows(rows: Iterable[str], start: re.Pattern[str]) -> Iterator[str]:
    """Documents made of a row that matches `start` and the rows after it."""
    document: list[str] = []
    for row in rows:
        if document and start.search(row):
            yield "".join(document)
            document = []
        document.append(row)
    if document:
        yield "".join(document)


def _explain(error: Exception, source: Source, split: str) -> DataError:
    if source.files is not None:
        broken = find_broken(source.files, split)
        return broken or DataError(f"data: {source.name} cannot be read: {_first_line(error)}")
    import datasets

    hint = (
        "without a network, copy the dataset here (hf download --repo-type dataset OWNER/NAME --local-dir DIR) "
        "and name that folder in data.recipe, or as dataset: in a recipe"
    )
    if isinstance(error, datasets.exceptions.DatasetNotFoundError):
        return DataError(
            f"{source.name!r} is neither a folder here nor a dataset on the Hub that this account can read", hint=hint
        )
    if "trust_remote_code" in str(error) or "scripts are no longer supported" in str(error):
        return DataError(
            f"dataset {source.name} brings Python code of its own, which is never run",
            hint="name a dataset of Parquet, JSONL or text files",
        )
    if isinstance(error, ValueError):
        return DataError(
            f"dataset {source.name}: {_first_line(error)}", hint="a recipe (data/NAME.yaml) can set config and splits"
        )
    return DataError(f"dataset {source.name} cannot be fetched from the Hub: {_first_line(error)}", hint=hint)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
