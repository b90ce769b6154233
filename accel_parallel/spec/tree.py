"""A YAML file as a plain tree, read safely, with the line of every key."""

from pathlib import Path
from typing import Any

import yaml

from accel_parallel.errors import Problem, SpecError

MAX_BYTES = 100_000
MAX_DEPTH = 20

Place = tuple[str, int | None]
Places = dict[tuple[str, ...], Place]
Tree = dict[str, Any]


def read_tree(path: Path) -> tuple[Tree, Places, list[Problem]]:
    """The plain mapping in a YAML file, the line of every key, and the keys given twice.

    Raises SpecError if the file cannot be read, is too large, is not YAML or not a mapping of sections.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise _refused(path, f"file has {size:,} bytes; a specification has at most {MAX_BYTES:,}")
        tree, node = parse(path.read_text(encoding="utf-8"))
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
    if "distributed_type" in tree:
        message = "is an accelerate file, not a specification; `accel-parallel launch FILE` takes it as it is"
        raise _refused(path, message)
    places, problems = _places(node, str(path))
    # An empty section (`ddp:`) means its defaults.
    return {key: {} if value is None else value for key, value in tree.items()}, places, problems


def shorten(text: str, width: int = 60) -> str:
    """At most `width` characters of a user's text, for a message."""
    return text if len(text) <= width else f"{text[: width - 3]}..."


# The C parser where libyaml is there: ten times as fast.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse(text: str) -> tuple[Any, Any]:
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
