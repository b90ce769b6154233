"""Running Accelerate's own code as if on another machine, silently, and leaving this process as it was."""

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of a module or class have these values inside, and their own afterwards."""
    own = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in own.items():
            setattr(owner, name, value)


@contextmanager
def only_environment(values: Mapping[str, str]) -> Iterator[None]:
    """The environment is exactly this inside."""
    own = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(values)
        yield
    finally:
        os.environ.clear()
        os.environ.update(own)


@contextmanager
def silence() -> Iterator[None]:
    """Accelerate's warnings are about files that nobody launches here."""
    before = logging.root.manager.disable
    try:
        logging.disable(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def in_one_line(error: Exception) -> str:
    """`ValueError: its message`."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
