"""The closing summary of a run, as a person reads it."""

import textwrap
from collections.abc import Mapping
from typing import Any

from accel_parallel.metrics import format_gib, format_tokens_per_sec

WIDTH = 80


def render_summary(summary: Mapping[str, Any]) -> str:
    """Lines of at most 80 columns from the content of `summary.json`."""
    peaks = summary["peak_memory_gib"]
    memory = "allocated" if summary["device"] != "cpu" else "resident"
    below = summary["unigram_entropy"] - summary["val_loss"]
    rows = [
        ("run", f"{summary['strategy']} on {summary['world_size']} x {summary['device']}, {summary['run']}"),
        ("steps", f"{summary['step']} of {summary['steps']}, {summary['tokens']:,} tokens{_rest(summary)}"),
        ("train loss", f"{_loss(summary['first_train_loss'])} first, {_loss(summary['last_train_loss'])} last"),
        ("validation loss", f"{summary['val_loss']:.4f} on {summary['val_tokens']:,} held-out tokens"),
        ("unigram entropy", f"{summary['unigram_entropy']:.4f} of the same tokens: {_beside(below)}"),
        ("speed", format_tokens_per_sec(summary["tokens_per_sec"]) if summary["tokens_per_sec"] else "nothing to do"),
        ("peak memory", ", ".join(map(format_gib, peaks[:8])) + (" ..." if len(peaks) > 8 else "") + f" {memory}"),
        ("checkpoint", summary["checkpoint"]),
    ]
    width = max(len(name) for name, _ in rows) + 2
    lines = []
    for name, text in rows:
        lines += textwrap.wrap(
            text, WIDTH, initial_indent=f"{name:<{width}}", subsequent_indent=" " * width, break_on_hyphens=False
        )
    sample = "".join(map(_shown, f"{summary['prompt']}>>>{summary['sample']}"))
    lines += ["", "sample (the prompt ends at >>>)"]
    for line in sample.splitlines():
        lines += textwrap.wrap(
            line, WIDTH, initial_indent="  ", subsequent_indent="  ", drop_whitespace=False, replace_whitespace=False
        ) or [""]
    return "\n".join(lines)


def _rest(summary: Mapping[str, Any]) -> str:
    return "" if summary["step"] >= summary["steps"] else "; the same command, without --stop-at, goes on from here"


def _shown(character: str) -> str:
    """What a model that has learned little writes may hold characters that a terminal obeys."""
    return character if character.isprintable() or character == "\n" else "\N{MIDDLE DOT}"


def _loss(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def _beside(below: float) -> str:
    return f"the model is {abs(below):.2f} nat {'better' if below > 0 else 'worse'}"
