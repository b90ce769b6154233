"""Types of command-line arguments."""

import argparse
import math
import re


def positive(text: str) -> int:
    """A whole number from 1 to 2**63 - 1."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """A whole number from 0 to 2**63 - 1."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on (and below 2**63)")
    return value


def above_zero(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def some_text(text: str) -> str:
    """Anything but nothing."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; give at least one character")
    return text


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE | re.ASCII)


def size(text: str) -> int:
    """Bytes: `5GB` is 5 x 10**9 as in transformers, `5GiB` 5 x 2**30; without a unit they are bytes."""
    match = _SIZE.fullmatch(text.strip())
    base = 1024 if match and match[3] else 1000
    value = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " ")) if match else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB or 500MB")
    return value
