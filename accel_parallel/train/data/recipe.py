"""Recipes: small YAML files that say where text comes from."""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

import accel_parallel
from accel_parallel.errors import DataError
from accel_parallel.spec.tree import parse
from accel_parallel.suggest import did_you_mean


class _Recipe(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    description: str = ""
    """One line for people."""
    text_column: str | None = None
    """The column that holds the text; none is `text`, or the only column of strings."""


class StdlibRecipe(_Recipe):
    """The sources of the Python standard library."""

    source: Literal["python_stdlib"]
    exclude: tuple[str, ...] = ()
    """Names of folders and files left out; `*` and `?` are wildcards."""


class FilesRecipe(_Recipe):
    """Files on this machine."""

    source: Literal["files"]
    path: str
    """A file or a folder, relative to the working directory."""
    suffixes: tuple[str, ...] | None = None
    """Read only files that end so; none reads every known kind."""
    exclude: tuple[str, ...] = ()
    """Names of folders and files left out; `*` and `?` are wildcards."""


class HubRecipe(_Recipe):
    """A dataset of the Hugging Face Hub, or a folder laid out like one."""

    source: Literal["hub"]
    dataset: str
    """`owner/name`, or a folder."""
    config: str | None = None
    """The dataset's configuration, where it has several."""
    revision: str | None = None
    """A commit, tag or branch."""
    train_split: str = "train"
    """The split to train on."""
    validation_split: str | None = None
    """The held-out split; none holds out documents of the training split."""
    document_start: str | None = None
    """A regular expression: a row it matches begins a document, other rows are appended to the one before."""


Recipe = StdlibRecipe | FilesRecipe | HubRecipe
KINDS: dict[str, type[Recipe]] = {"python_stdlib": StdlibRecipe, "files": FilesRecipe, "hub": HubRecipe}
_ADAPTER: TypeAdapter[Recipe] = TypeAdapter(Annotated[Recipe, Field(discriminator="source")])


def recipe_folders() -> list[Path]:
    """Where recipes are looked up: the working directory's `data`, then the ones that come with the package."""
    package = Path(accel_parallel.__file__).parent
    installed = package / "recipes"
    return [Path("data"), installed if installed.is_dir() else package.parent / "data"]


def recipe_names() -> list[str]:
    """Every recipe that can be named."""
    return sorted({path.stem for folder in recipe_folders() if folder.is_dir() for path in folder.glob("*.yaml")})


def find_recipe(name: str) -> Path | None:
    """The file of the recipe `name`, if there is one."""
    if not name or name != Path(name).name:
        return None
    return next((path for folder in recipe_folders() if (path := folder / f"{name}.yaml").is_file()), None)


def read_recipe(path: Path) -> Recipe:
    """The recipe in a file.

    Raises DataError that names the file, every wrong key and what it may be.
    """
    try:
        tree, _ = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"recipe {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"recipe {path} is not UTF-8 text") from None
    except (yaml.YAMLError, ValueError, AttributeError, LookupError, RecursionError) as error:
        raise DataError(f"recipe {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise DataError(f"recipe {path} should hold keys such as source:, not {type(tree).__name__}")
    try:
        return _ADAPTER.validate_python(tree)
    except ValidationError as error:
        found = "; ".join(_describe(item, tree) for item in error.errors(include_url=False))
        raise DataError(f"recipe {path}: {found}") from None


def _describe(item: Any, tree: dict[Any, Any]) -> str:
    kind, value = item["type"], item["input"]
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        source = tree.get("source")
        return f"source is {source!r}; one of {', '.join(KINDS)}{did_you_mean(source, KINDS)}"
    # The first part of the place is the kind of source, the last may be an index into a list.
    key = next(str(part) for part in item["loc"][1:])
    if kind == "extra_forbidden":
        return f"unknown key {key!r}{did_you_mean(key, KINDS[tree['source']].model_fields)}"
    if kind == "missing":
        return f"key {key!r} is missing"
    return f"{key} is {value!r}: {item['msg'].removeprefix('Input ')}"
