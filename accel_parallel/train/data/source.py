"""From `spec.data` to a source of documents, described cheaply and opened only when the cache is cold."""

import platform
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from accel_parallel.errors import DataError
from accel_parallel.spec import Data
from accel_parallel.suggest import did_you_mean
from accel_parallel.train.data.files import KNOWN, LocalFiles, list_files, suffix_of, walk
from accel_parallel.train.data.recipe import (
    FilesRecipe,
    HubRecipe,
    Recipe,
    StdlibRecipe,
    find_recipe,
    read_recipe,
    recipe_names,
)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Source:
    """Where documents come from."""

    name: str
    """For messages."""
    identity: dict[str, Any]
    """What decides the text, as JSON; known without reading the text and without importing `datasets`."""
    load: dict[str, Any]
    """Arguments of `datasets.load_dataset`."""
    splits: dict[str, str]
    """The dataset's names of our splits `train` and, where the source has one, `validation`."""
    streaming: bool = True
    """Read as needed, instead of first fetching everything into the Hub's cache."""
    text_column: str | None = None
    document_start: str | None = None
    files: LocalFiles | None = field(default=None, compare=False)


def open_source(data: Data) -> Source:
    """The source that `data.recipe` names: a recipe, a file or folder, or a Hub dataset `owner/name`.

    Raises DataError for a name that is none of them, a path without text, or a recipe that is wrong.
    """
    return _from_recipe(find(data.recipe), data)


def find(name: str) -> Recipe:
    """The recipe `name` stands for; a path and a Hub name make one of their own."""
    if not name.strip():
        raise DataError(
            "data.recipe is empty", hint=f"one of {', '.join(recipe_names())}, a path, or a Hub dataset as owner/name"
        )
    if recipe := find_recipe(name):
        return read_recipe(recipe)
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return read_recipe(path)
    if path.exists() or path.is_absolute() or name.startswith((".", "~")) or suffix_of(path, KNOWN):
        return FilesRecipe(source="files", path=name)
    if _HUB_NAME.fullmatch(name):
        return HubRecipe(source="hub", dataset=name)
    known = recipe_names()
    raise DataError(
        f"data.recipe {name!r} is neither a recipe ({', '.join(known)}) nor a file or folder"
        f"{did_you_mean(name, known)}",
        hint="a Hub dataset is written owner/name",
    )


def _from_recipe(recipe: Recipe, data: Data) -> Source:
    column = data.text_column or recipe.text_column
    if isinstance(recipe, StdlibRecipe):
        files = _stdlib(recipe.exclude)
        sizes = [[path.relative_to(files.root).as_posix(), path.stat().st_size] for path in files.train]
        # Without times of change: an equal Python gives equal text wherever and whenever it was installed.
        identity: dict[str, Any] = {"stdlib": platform.python_version(), "files": sizes}
        return _local(f"Python {platform.python_version()}'s standard library", files, identity, None)
    if isinstance(recipe, FilesRecipe):
        files = list_files(Path(recipe.path).expanduser(), recipe.suffixes, recipe.exclude)
        return _local(recipe.path, files, {"builder": files.builder, "files": files.fingerprint()}, column)
    return _hub(recipe, data, column)


def _local(name: str, files: LocalFiles, identity: dict[str, Any], column: str | None) -> Source:
    data_files = {"train": [str(path.resolve()) for path in files.train]}
    if files.validation:
        data_files["validation"] = [str(path.resolve()) for path in files.validation]
    load: dict[str, Any] = {"path": files.builder, "data_files": data_files}
    if files.builder == "text":
        load["sample_by"] = "document"
    splits = {split: split for split in data_files}
    column = None if files.builder == "text" else column
    return Source(name, {**identity, "text_column": column}, load, splits, text_column=column, files=files)


def _hub(recipe: HubRecipe, data: Data, column: str | None) -> Source:
    folder = Path(recipe.dataset).expanduser()
    local = folder.is_dir()
    if not local and not _HUB_NAME.fullmatch(recipe.dataset):
        raise DataError(
            f"dataset {recipe.dataset!r} is neither a folder nor a Hub name", hint="a Hub dataset is written owner/name"
        )
    if recipe.document_start is not None:
        _compiles(recipe.document_start)
    identity = {**recipe.model_dump(exclude={"description", "source"}), "text_column": column}
    if local:
        files = [(path.relative_to(folder).as_posix(), path.stat()) for path in walk(folder)]
        identity |= {"dataset": None, "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in files]}
    load = {"path": str(folder) if local else recipe.dataset, "name": recipe.config, "revision": recipe.revision}
    splits = {"train": recipe.train_split}
    if recipe.validation_split:
        splits["validation"] = recipe.validation_split
    # Without a bound everything is needed, and a download of whole files can be resumed.
    streaming = local or data.max_tokens is not None
    return Source(recipe.dataset, identity, load, splits, streaming, column, recipe.document_start)


def _compiles(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise DataError(f"document_start {pattern!r} is not a regular expression: {error}") from None


def _stdlib(exclude: Iterable[str]) -> LocalFiles:
    """Sources of the standard library, ordered by a digest of their paths so that any prefix mixes topics."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [*exclude, "site-packages", "dist-packages"]
    files = (
        [path for path in walk(root, names) if path.suffix == ".py" and path.stat().st_size] if root.is_dir() else []
    )
    if not files:
        raise DataError(
            f"this Python has no library sources in {root}", hint="set data.recipe to a file or folder of text"
        )
    files.sort(key=lambda path: blake2b(path.relative_to(root).as_posix().encode()).digest())
    return LocalFiles(root, "text", tuple(files))
