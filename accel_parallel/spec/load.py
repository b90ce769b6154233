"""Reading a specification: file, strategy and command line merged, validated once, every problem with its place."""

import os
import re
import reprlib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from accel_parallel.errors import Problem, SpecError
from accel_parallel.spec.fields import Section, keys
from accel_parallel.spec.run import RunSpec
from accel_parallel.spec.tree import Place, Places, Tree, parse, read_tree, shorten
from accel_parallel.suggest import did_you_mean

DEFAULT_PATH = Path("accelerate_configs/parallelism.yaml")
ENVIRONMENT_VARIABLE = "ACCEL_PARALLEL_SPEC"


def find_spec(explicit: Path | None = None) -> Path | None:
    """`--spec`, else `$ACCEL_PARALLEL_SPEC`, else `./accelerate_configs/parallelism.yaml`, else none: the defaults.

    Raises SpecError when a file that was named does not exist.
    """
    named, how = (
        (explicit, "--spec") if explicit else (os.environ.get(ENVIRONMENT_VARIABLE), f"${ENVIRONMENT_VARIABLE}")
    )
    if named:
        path = Path(named)
        if not path.is_file():
            raise SpecError([Problem(f"{how} names {str(path)!r}, which is not a file", code="spec-missing")])
        return path
    return DEFAULT_PATH if DEFAULT_PATH.is_file() else None


@dataclass(frozen=True)
class Draft:
    """A specification that has been read and not yet decided: a strategy may still change keys of it."""

    source: str
    tree: Tree
    places: Places
    problems: tuple[Problem, ...] = ()

    def resolve(self, overrides: Mapping[str, Any] | None = None, source: str = "strategy") -> RunSpec:
        """The whole specification, dotted `overrides` winning. What follows from another key is worked out after them.

        Raises SpecError with one problem for everything that is wrong.
        """
        # `_put` copies the section that it changes.
        tree, places = dict(self.tree), dict(self.places)
        _override(tree, places, overrides or {}, source)
        return _validate(tree, places, self.source, list(self.problems))


def read_spec(path: Path | None = None, sets: Iterable[str] = ()) -> Draft:
    """File (or the defaults) and `--set key=value` entries, in rising order.

    Raises SpecError if the file cannot be read at all; other problems are told by `Draft.resolve`, all at once.
    """
    tree, places, problems = read_tree(path) if path else ({}, {}, [])
    for entry in sets:
        key, value, problem = parse_set(entry)
        if problem is None and not _put(tree, key, value):
            problem = Problem(f"{key.split('.')[0]} is not a section in the file", path=f"--set {entry}")
        if problem:
            problems.append(problem)
        else:
            places[tuple(key.split("."))] = (f"--set {key}", None)
    return Draft(str(path) if path else "defaults", tree, places, tuple(problems))


def load_spec(path: Path | None = None, sets: Iterable[str] = ()) -> RunSpec:
    """`read_spec`, resolved as it stands. Raises SpecError with one problem for everything that is wrong."""
    return read_spec(path, sets).resolve()


def parse_set(entry: str) -> tuple[str, Any, Problem | None]:
    """Split `section.key=value`, the value read as YAML."""
    key, equals, text = entry.partition("=")
    key = key.strip()
    if not equals or key.count(".") != 1:
        message = "an override is written section.key=value, for example training.lr=1e-3"
        meant = [f"{section}.{key}" for section in RunSpec.model_fields if key in _keys(section)]
        hint = f"did you mean {' or '.join(meant)}?" if meant else None
        return key, None, Problem(message, path=f"--set {shorten(entry)}", hint=hint)
    try:
        return key, parse(text)[0], None
    # The last two: a !!tag without a value.
    except (yaml.YAMLError, RecursionError, ValueError, AttributeError, LookupError):
        return key, None, Problem(f"{shorten(text)!r} is not a YAML value", path=f"--set {key}")


def _override(tree: Tree, places: Places, overrides: Mapping[str, Any], source: str) -> None:
    for key, value in overrides.items():
        if _put(tree, key, value):
            places[tuple(key.split("."))] = (source, None)


def _put(tree: Tree, key: str, value: Any) -> bool:
    section, name = key.split(".")
    branch = deepcopy(tree.get(section, {}))
    if not isinstance(branch, dict):
        return False
    branch[name] = value
    tree[section] = branch
    return True


def _validate(tree: Tree, places: Places, source: str, problems: list[Problem]) -> RunSpec:
    try:
        spec = RunSpec.model_validate(tree)
    except ValidationError as error:
        # One problem a key and kind: a list with a thousand wrong items is one mistake.
        found = {(item["loc"][:2], item["type"]): item for item in reversed(error.errors(include_url=False))}
        problems += [_problem(item, places, source) for item in reversed(found.values())]
    else:
        if not problems:
            return spec
    raise SpecError(problems)


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


def _problem(item: Any, places: Mapping[tuple[str, ...], Place], source: str) -> Problem:
    """One readable line from one of pydantic's findings."""
    loc = tuple(str(part) for part in item["loc"])
    # Keys that contradict each other are found on their section; an override among them is the likely cause.
    overriding = [place for key, place in places.items() if len(loc) == 1 and key[:1] == loc and place[1] is None]
    place, line = overriding[-1] if overriding else places.get(loc[:2]) or places.get(loc[:1]) or (source, None)
    key = ".".join(shorten(part) for part in loc[:2])
    kind, value, text = item["type"], item["input"], item["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if kind in ("extra_forbidden", "invalid_key"):
        known = _keys(loc[0]) if len(loc) > 1 else list(RunSpec.model_fields)
        what = "key" if len(loc) > 1 else "section"
        hint = did_you_mean(shorten(loc[-1]), known) or f"; known: {', '.join(known)}"
        message = f"unknown {what} {key}{hint}"
        return Problem(message, code="spec-unknown-key", path=place, line=line)
    if kind == "missing":
        text = "is missing, and no preset is named"
    elif kind in ("model_type", "model_attributes_type"):
        text = "should be a section with keys below it"
    elif kind == "tuple_type":
        text = "should be a list such as [a, b]"
    elif kind == "literal_error":
        text += did_you_mean(_REPR.repr(value), re.findall(r"'(\w+)'", item["ctx"]["expected"]))
    if kind == "missing":
        shown = ""
    elif isinstance(value, dict):
        shown = ":"
    else:
        shown = f" is {_REPR.repr(value)}:"
    return Problem(f"{key}{shown} {text}", code="spec-value", path=place, line=line)


def _keys(section: str) -> list[str]:
    field = RunSpec.model_fields.get(section)
    model = field.annotation if field else None
    return list(keys(model)) if isinstance(model, type) and issubclass(model, Section) else []
