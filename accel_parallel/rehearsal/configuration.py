"""Whether a file arrives: each key from the file over the launcher and Accelerate's state to the wrapped module."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from accel_parallel.rehearsal.check import Check, table

ASKED = "is it what was asked?"
WIDTHS = (34, 20, 18)
"""Of the columns of keys; what is cut off is whole in `--json`."""


def is_what_was_asked(processes: int, fsdp: bool, facts: Mapping[str, Any]) -> Check:
    """Every key arrives, as many processes start as are asked for, and each prepares what it is asked for."""
    stations: Sequence[Mapping[str, Any]] = facts["stations"]
    dead = [station for station in stations if station["dead"]]
    mismatches = [facts["refused"]] if facts["refused"] else []
    if not facts["refused"] and facts["processes_started"] != processes:
        started = facts["processes_started"]
        mismatches.append(f"asked for {processes} processes, Accelerate starts {started}")
    mismatches += [_dead_line(station) for station in dead if "." in station["key"]]
    if fsdp and not facts["refused"] and not any(_name(station) == "auto_wrap_policy" for station in stations):
        mismatches.append(
            "fsdp_config has no fsdp_auto_wrap_policy: no layer is wrapped, and all are gathered at once; "
            "name TRANSFORMER_BASED_WRAP, or NO_WRAP if that is meant"
        )
    mismatches += sorted({rank["error"]["message"] for rank in facts["ranks"] if "error" in rank})
    substituted = _substitutions(facts)
    summary = f"{len(stations)} keys, {len(substituted)} done differently on CPU" if stations else "nothing to compare"
    idle = [station["key"] for station in dead if "." not in station["key"]]
    notes = [f"without effect from a file, in Accelerate 1.15 and here: {', '.join(idle)}"] if idle else []
    rows = [[station["key"].rpartition(".")[2], station["asked"], _arrives(station)] for station in stations]
    cut = [[_cut(cell, width) for cell, width in zip(row, WIDTHS, strict=True)] for row in rows]
    shown = table(["key", "asked", "arrives as"], cut, left=3)
    lines = [*shown, *notes, *[f"on CPU: {item}" for item in substituted], *_module(facts)]
    return Check("asked", ASKED, not mismatches, summary, tuple(mismatches), tuple(lines))


def _dead_line(station: Mapping[str, Any]) -> str:
    meant = f"; did you mean {station['meant']}?" if station["meant"] else ""
    return f"{station['key']}: {station['asked']} has no effect: it {station['where']}{meant}"


def _name(station: Mapping[str, Any]) -> str:
    return str(station["key"].rpartition(".")[2].removeprefix("fsdp_"))


def _arrives(station: Mapping[str, Any]) -> str:
    """The field of Accelerate's state that is the key's own, else the first that it decides."""
    if station["dead"]:
        return "nothing"
    held = {**station["state"], **{key: value for key, value in station["environment"].items() if not station["state"]}}
    own = [field for field in held if field.rpartition(".")[2] == _name(station)]
    field = next(iter([*own, *held]), "")
    if not field:
        return str(station["where"])
    value = str(held[field]).rpartition(".")[2] if str(held[field]).startswith("torch.") else str(held[field])
    return value if field in own else f"{field.removeprefix('plugin.')} {value}"


def _substitutions(facts: Mapping[str, Any]) -> list[str]:
    ranks = [rank for rank in facts["ranks"] if "error" not in rank]
    return [
        f"{item['key']}: {item['asked']} -> {item['got']} ({item['reason']})"
        for item in (ranks[0]["substitutions"] if ranks else [])
    ]


def _module(facts: Mapping[str, Any]) -> list[str]:
    """The last station: what the prepared model shows."""
    ranks = [rank for rank in facts["ranks"] if rank.get("observed")]
    if not ranks:
        return []
    seen = ranks[0]["observed"]
    classes = Counter(seen["units"].values())
    units = f", units: {', '.join(f'{n} {name}' for name, n in classes.items())}" if classes else ""
    reshards = {True: ", given back after the forward pass", False: ", kept until the backward pass", None: ""}
    dtypes = ", ".join(dtype.removeprefix("torch.") for dtype in seen["compute_dtypes"])
    return [
        f"the model: {seen['parallelism']}, {seen['world_size']} processes, {dtypes}",
        f"{units.removeprefix(', ')}{reshards[seen['resharded_after_forward']]}",
    ][: 2 if units else 1]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
