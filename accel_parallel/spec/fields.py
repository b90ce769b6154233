"""Building blocks of the specification: where a key goes, and the types its values may have."""

import ast
import inspect
import re
import sys
from enum import StrEnum
from fractions import Fraction
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool
from pydantic.fields import FieldInfo


class Destination(StrEnum):
    """Where a key of the specification takes effect."""

    YAML = "accelerate YAML"
    ACCELERATOR = "Accelerator argument"
    OURS = "training loop"


class Section(BaseModel):
    """A frozen group of keys; unknown keys are refused."""

    # Built on first use: a section on its own is not validated, only the whole specification is.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


def keys(section: type[Section]) -> dict[str, FieldInfo]:
    """The fields of a section by the names that they have in a file (`async` cannot be one in Python)."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def descriptions(section: type[Section]) -> dict[str, str]:
    """The line under each key of a section, read from its source. (pydantic can do it, at 75 ms for each start.)"""
    for node in _module(section.__module__).body:
        if isinstance(node, ast.ClassDef) and node.name == section.__name__:
            pairs = zip(node.body, node.body[1:], strict=False)
            return {
                section.model_fields[field.target.id].alias or field.target.id: text.value.value
                for field, text in pairs
                if isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            }
    raise AssertionError(f"{section} is not in the source of {section.__module__}")


@cache
def _module(name: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[name]))


def carried_by_yaml() -> Any:
    """A key that Accelerate's YAML carries: changed in the specification, never by `train --set`."""
    return Field(json_schema_extra={"destination": Destination.YAML.value})


def passed_to_accelerator() -> Any:
    """A key that becomes an argument of `accelerate.Accelerator` or of one of its handlers."""
    return Field(json_schema_extra={"destination": Destination.ACCELERATOR.value})


_COUNT = re.compile(r"([+-]?\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d{1,2})?)\s*([kKmMbBgGtT]?)$")
_SUFFIX = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def parse_count(value: Any) -> Any:
    """Read `1e6`, `20M`, `64k` or `1_000_000` as a whole number; anything else is left for the type check.

    Suffixes are decimal: k is 10**3, M 10**6, B and G 10**9, T 10**12.
    """
    if isinstance(value, bool):
        raise ValueError("should be a whole number, not true or false")
    if not isinstance(value, str):
        return value
    match = _COUNT.match(value.strip())
    if match is None:
        raise ValueError("should be a whole number such as 1000000, 1e6, 20M or 64k")
    number = Fraction(match[1].replace("_", "")) * _SUFFIX[match[2].lower()]
    if number.denominator != 1:
        raise ValueError("should be a whole number such as 1000000, 1e6, 20M or 64k")
    return int(number)


def refuse_bool(value: Any) -> Any:
    """True and false are numbers to Python, and never what somebody meant."""
    if isinstance(value, bool):
        raise ValueError("should be a number, not true or false")
    return value


def _yaml_no(value: Any) -> Any:
    """An unquoted `no` is the boolean false in YAML 1.1."""
    return "no" if value is False else value


Number = Annotated[int, BeforeValidator(parse_count), Field(le=2**63 - 1)]
Count = Annotated[Number, Field(ge=1)]
Dimension = Annotated[Number, Field(ge=1, le=10**7)]
NonNegative = Annotated[Number, Field(ge=0)]
Real = Annotated[float, BeforeValidator(refuse_bool)]
Flag = StrictBool
NoIsAWord = BeforeValidator(_yaml_no)
