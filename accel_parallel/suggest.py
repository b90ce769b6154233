"""The one place that guesses what a misspelt word was meant to be."""

from collections.abc import Iterable


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the closest known word, or an empty string."""
    match = closest(word, known)
    return f"; did you mean {match!r}?" if match else ""


def closest(word: object, known: Iterable[str]) -> str:
    """The known word most like this one, or an empty string."""
    from difflib import get_close_matches  # only where something is wrong: its import takes milliseconds

    lowered = {name.lower(): name for name in known}
    matches = get_close_matches(str(word).lower(), lowered, n=1, cutoff=0.6)
    return lowered[matches[0]] if matches else ""
