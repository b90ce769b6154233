"""Writing a specification as YAML that a person can read and edit."""

import textwrap
from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import yaml

from accel_parallel.spec.fields import Section, descriptions
from accel_parallel.spec.presets import PRESETS
from accel_parallel.spec.run import RunSpec
from accel_parallel.spec.sections import default_warmup

WIDTH = 120
COMMENT_COLUMN = 36
HEADER = """\
# What a run is: the file to edit. `accel-parallel config` turns it into the Accelerate files beside it.
# A key left out takes its default; one commented out here follows from another key until you give it.
# Counts may be written 1000000, 1e6, 20M or 64k.
"""


def dump_spec(spec: RunSpec, *, comments: bool = False) -> str:
    """The resolved specification as YAML; with `comments`, a file to edit: each key beside its description.

    In a file to edit, what follows from another key (a preset's shape) is shown but commented out, so that
    changing the preset changes it. Reading either form gives an equal specification.
    """
    lines = HEADER.splitlines() if comments else []
    for name, field in RunSpec.model_fields.items():
        model = field.annotation
        assert isinstance(model, type) and issubclass(model, Section)
        values = getattr(spec, name).model_dump(mode="json", by_alias=True)
        derived = _derived(name, values)
        lines += ["", *beside(f"{name}:", (model.__doc__ or "").partition("\n")[0])] if comments else [f"{name}:"]
        for key, value in values.items():
            entry = f"{key}: {scalar(value)}"
            if not comments:
                lines.append(f"  {entry}")
            else:
                lines += beside(f"  # {entry}" if key in derived else f"  {entry}", descriptions(model)[key])
    return "\n".join(lines) + "\n"


def scalar(value: Any) -> str:
    """One YAML value on one line; words that YAML 1.1 would read as booleans come out quoted."""
    return _scalar(value) if isinstance(value, Hashable) else _on_one_line(value)


def _on_one_line(value: Any) -> str:
    # Only a double-quoted scalar keeps a line break on one line, of which YAML knows more than one.
    style = '"' if isinstance(value, str) and not value.isprintable() else None
    text = yaml.safe_dump(value, default_flow_style=True, default_style=style, width=2**31, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("...").rstrip("\n")


# The same few words stand in every strategy's file.
_scalar = lru_cache(maxsize=1000, typed=True)(_on_one_line)


def _derived(section: str, values: dict[str, Any]) -> set[str]:
    """Keys whose value is what it would be if the key were left out, because another key says so."""
    if section == "fsdp":
        return {"wrap"} if values["wrap"] == ("size" if values["version"] == 1 else "block") else set()
    if section == "training":
        return {"warmup_steps"} if values["warmup_steps"] == default_warmup(values["steps"]) else set()
    if section == "model" and values["preset"] is not None:
        return {key for key, value in PRESETS[values["preset"]].items() if values[key] == value}
    return set()


def beside(entry: str, comment: str | None, column: int = COMMENT_COLUMN) -> list[str]:
    """The entry with its comment in a column of its own, going on below where it is long."""
    column = max(column, len(entry) + 2)
    first, *rest = textwrap.wrap(comment or "", max(40, WIDTH - column - 2)) or [""]
    return [f"{entry:<{column}}# {first}" if first else entry, *(f"{'':<{column}}# {line}" for line in rest)]
