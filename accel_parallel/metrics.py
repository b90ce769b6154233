"""The lines of `metrics.jsonl`, and how numbers are shown to people.

Units: GiB is 2**30 bytes; tokens and FLOPs are plain counts.
"""

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO


def to_line(kind: str, values: Mapping[str, Any]) -> str:
    """One JSON object on one line. Numbers that are not finite become null: JSON has no NaN."""
    return json.dumps({"kind": kind, **{key: _finite(value) for key, value in values.items()}})


def open_lines(path: Path) -> TextIO:
    """A `metrics.jsonl` to append lines to; one that a kill cut off is ended first. Raises OSError."""
    file = path.open("a+", encoding="utf-8", buffering=1)
    if file.tell() and not path.read_bytes().endswith(b"\n"):
        file.write("\n")
    return file


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a `metrics.jsonl`, without what a kill cut off or somebody else wrote."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and "kind" in row:
                rows.append(row)
    return rows


def by_step(rows: Iterable[Mapping[str, Any]], kind: str) -> dict[int, Mapping[str, Any]]:
    """The lines of one kind by step in rising order; after a replay the last line of a step wins."""
    latest = {row["step"]: row for row in rows if row["kind"] == kind and isinstance(row.get("step"), int)}
    return dict(sorted(latest.items()))


def mfu(tokens_per_sec: float, flops_per_token: float, peak_tflops: float, num_processes: int) -> float:
    """Model FLOPs utilisation, a fraction: FLOPs the model needs over FLOPs the accelerators could do.

    Chowdhery et al. 2022, "PaLM", appendix B. `peak_tflops` is dense, per accelerator, at the precision in use.
    """
    return tokens_per_sec * flops_per_token / (peak_tflops * 1e12 * num_processes)


def format_gib(gib: float) -> str:
    return f"{gib:.2f} GiB"


def format_tokens_per_sec(rate: float) -> str:
    return f"{rate:,.0f} tokens/s"


def format_bytes(count: int) -> str:
    """In the largest unit of 1024 that leaves a number above 1."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"


def format_processes(number: int) -> str:
    return "1 process" if number == 1 else f"{number} processes"
