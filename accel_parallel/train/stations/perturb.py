"""Other values that a key may have."""

from collections.abc import Iterator
from typing import Any

from accelerate.utils import ComputeEnvironment, DistributedType, constants

from accel_parallel.train.stations.launcher import parser

# How the sections of a file call the launcher's options; the other two sections have keys without a prefix.
PREFIXES = {
    "fsdp_config": "fsdp_",
    "dynamo_config": "dynamo_",
    "fp8_config": "fp8_",
    "parallelism_config": "parallelism_config_",
    "megatron_lm_config": "megatron_lm_",
    "mpirun_config": "mpirun_",
}
_PREFIX_ADDED = ("fsdp_config", "dynamo_config", "fp8_config")
"""Where the launcher puts the prefix before keys without it: `_validate_launch_command`, commands/launch.py (1.15)."""
_WORDS = [words for name, words in vars(constants).items() if name.startswith("FSDP_") and isinstance(words, list)]
_TRUTHS = {"true": "false", "false": "true", "yes": "no", "no": "yes"}


def options(section: str) -> list[str]:
    """The keys that a section may have, by the launcher's own parser; none for sections without a prefix."""
    prefix = PREFIXES.get(section)
    return [] if prefix is None else [a.dest for a in parser()._actions if a.dest.startswith(prefix)]


def read_as(section: str, key: str) -> str:
    """The launcher's option that a key of a section sets."""
    # It asks for the prefix without its last letter.
    added = section in _PREFIX_ADDED and not key.startswith(PREFIXES[section].rstrip("_"))
    return PREFIXES[section] + key if added else key


def alternatives(section: str, key: str, value: Any) -> Iterator[Any]:
    """Values unlike `value`, the likeliest to be valid first."""
    seen = [value]
    for other in (*_choices(section, key), *_others(section or key, value)):
        # True is 1 and False is 0 to Python.
        if not any(other == before and isinstance(other, bool) == isinstance(before, bool) for before in seen):
            seen.append(other)
            yield other


def _choices(section: str, key: str) -> list[str]:
    """What the launcher's parser would take; the two keys that it does not have are enumerations."""
    if not section and key in ("distributed_type", "compute_environment"):
        kinds: Any = DistributedType if key == "distributed_type" else ComputeEnvironment
        return [kind.value for kind in kinds]
    name = read_as(section, key)
    return next((list(a.choices) for a in parser()._actions if a.dest == name and a.choices), [])


def _others(section: str, value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, value * 2, value - 1)
    elif isinstance(value, str):
        yield from (word for words in _WORDS if value.upper() in words for word in words if word != value.upper())
        if value.lower() in _TRUTHS:
            yield _TRUTHS[value.lower()]
        if value.isdecimal():
            yield str(int(value) + 1)
        yield from (value + "x", "0,1")
    elif isinstance(value, list):
        yield [*value, "x"]
    elif isinstance(value, dict) and value:
        yield {}
    elif value is None or value == {}:
        yield from ({name: other} for name in options(section) for other in ("true", 2))
        if value is None:
            yield from (True, 1, 2, "x", "0,1")
