"""Reading a specification: file, strategy and command line merged, validated once, every problem with its place."""

import os
import re
import reprlib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from accel_parallel.errors import Problem, SpecError
from accel_parallel.spec.run import RunSpec
from accel_parallel.suggest import did_you_mean

DEFAULT_PATH = Path("accelerate_configs/parallelism.yaml")
ENVIRONMENT_VARIABLE = "ACCEL_PARALLEL_SPEC"
MAX_BYTES = 100_000
MAX_DEPTH = 20

Place = tuple[str, int | None]
Places = dict[tuple[str, ...], Place]
Tree = dict[str, Any]


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


def load_spec(
    path: Path | None = None, overrides: Mapping[str, Any] | None = None, sets: Iterable[str] = ()
) -> RunSpec:
    """Merge file (or the defaults), dotted `overrides` of a strategy and `--set key=value` entries, in rising order.

    Raises SpecError with one problem for everything that is wrong.
    """
    tree, places, problems = read_tree(path) if path else ({}, {}, [])
    _override(tree, places, overrides or {}, "strategy")
    for entry in sets:
        key, value, problem = parse_set(entry)
        if problem is None and not _put(tree, key, value):
            problem = Problem(f"{key.split('.')[0]} is not a section in the file", path=f"--set {entry}")
        if problem:
            problems.append(problem)
        else:
            places[tuple(key.split("."))] = (f"--set {key}", None)
    return _validate(tree, places, str(path) if path else "defaults", problems)


def override_spec(spec: RunSpec, overrides: Mapping[str, Any], source: str = "strategy") -> RunSpec:
    """The same specification with dotted keys replaced, validated again.

    Raises SpecError naming `source` when the result contradicts itself.
    """
    tree: Tree = spec.model_dump(mode="json")
    places: Places = {}
    _override(tree, places, overrides, source)
    return _validate(tree, places, source, [])


def parse_set(entry: str) -> tuple[str, Any, Problem | None]:
    """Split `section.key=value`, the value read as YAML."""
    key, equals, text = entry.partition("=")
    key = key.strip()
    if not equals or key.count(".") != 1:
        message = "an override is written section.key=value, for example training.lr=1e-3"
        return key, None, Problem(message, path=f"--set {shorten(entry)}")
    try:
        return key, _parse(text)[0], None
    except (
        yaml.YAMLError,
        RecursionError,
        ValueError,
        AttributeError,
        LookupError,
    ):  # the last two: !!tag without value
        return key, None, Problem(f"{shorten(text)!r} is not a YAML value", path=f"--set {key}")


def read_tree(path: Path) -> tuple[Tree, Places, list[Problem]]:
    """The plain mapping in a YAML file, the line of every key, and the keys given twice.

    Raises SpecError if the file cannot be read, is too large, is not YAML or not a mapping of sections.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise _refused(path, f"file has {size:,} bytes; a specification has at most {MAX_BYTES:,}")
        tree, node = _parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refused(path, f"cannot read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _refused(path, "is not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise _refused(path, f"is not valid YAML: {error.problem}", line) from None
    except (yaml.YAMLError, ValueError, AttributeError, LookupError) as error:
        raise _refused(path, f"is not valid YAML: {shorten(str(error).partition(chr(10))[0], 200)}") from None
    if tree is None:
        return {}, {}, []
    if not isinstance(tree, dict):
        raise _refused(path, f"should hold sections such as training:, not a {type(tree).__name__}", 1)
    places, problems = _places(node, str(path))
    # An empty section (`ddp:`) means its defaults.
    return {key: {} if value is None else value for key, value in tree.items()}, places, problems


def shorten(text: str, width: int = 60) -> str:
    """At most `width` characters of a user's text, for a message."""
    return text if len(text) <= width else f"{text[: width - 3]}..."


# The C parser where libyaml is there: ten times as fast.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _parse(text: str) -> tuple[Any, Any]:
    """The value in one YAML document, and its node. Refuses aliases: with them few lines can stand for billions."""
    depth = 0
    event: Any
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        mark: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            problem = "an alias (*name) is used; write the value out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        if depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=mark)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return (None if node is None else loader.construct_document(node)), node
    finally:
        loader.dispose()


def _refused(path: Path, message: str, line: int | None = None) -> SpecError:
    return SpecError([Problem(message, code="spec-file", path=str(path), line=line)])


def _places(node: Any, path: str) -> tuple[Places, list[Problem]]:
    places: Places = {}
    problems: list[Problem] = []

    def note(mapping: Any, above: tuple[str, ...]) -> None:
        for key, value in mapping.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            loc, line = (*above, key.value), key.start_mark.line + 1
            if loc in places:
                message = f"{'.'.join(loc)} is given twice; first in line {places[loc][1]}"
                problems.append(Problem(message, code="spec-duplicate-key", path=path, line=line))
            else:
                places[loc] = (path, line)
            if not above and isinstance(value, yaml.MappingNode):
                note(value, loc)

    note(node, ())
    return places, problems


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
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []
