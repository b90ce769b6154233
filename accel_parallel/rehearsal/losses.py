"""Whether a script learns under a file what it learns under DDP: the losses that it passes to Accelerate."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from accel_parallel.asked import Asked
from accel_parallel.rehearsal.check import Check, table
from accel_parallel.rehearsal.numbers import FLOAT32, SAME, Tolerance, relative

LOW = Tolerance("16 bits", 1e-2, 1e-1)
"""By itself Accelerate reduces gradients of bf16 in bf16 under FSDP (run: 2.6e-3 from DDP's autocast in the loss)."""
COMPARED = 8
"""First losses that are compared: rounding grows with every step that follows from it."""

Rank = Mapping[str, Any]


def learns_what_ddp_learns(asked: Asked, ranks: Sequence[Rank], references: Sequence[Mapping[str, Any]]) -> Check:
    """The losses passed to `accelerator.backward`, of each process against the same one under DDP.

    `references` are the facts of launches under DDP, as in `judge_script`.
    """
    holds, summary, mismatches = _compared(ranks, references)
    if not references and not asked.fsdp:
        summary = "replicas are the reference"
    return Check("same_numbers", SAME, holds, summary, mismatches, _losses(ranks))


def _compared(
    ranks: Sequence[Rank], references: Sequence[Mapping[str, Any]]
) -> tuple[bool | None, str, tuple[str, ...]]:
    """Whether they are the same, or None and why that was not seen."""
    if not references:
        return None, "--against-ddp runs the script under DDP too, and compares", ()
    if not ranks or causes(ranks):
        return None, "the script did not run to its end", ()
    failed = [references[0]["refused"] or "", *causes(references[0]["ranks"])]
    if any(failed):
        return None, f"under DDP the script fails: {' '.join(failed).strip()}", ()
    expected = references[0]["ranks"]
    number = min(COMPARED, *(len(rank["backward_losses"]) for rank in (*ranks, *expected)))
    if not number:
        return None, "no loss went through accelerator.backward", ()
    tolerance = LOW if is_low(ranks) or is_low(expected) else FLOAT32
    apart, line = _apart(ranks, expected)
    how = f"within {apart:.0e} of DDP (limit {tolerance.loss:.0e})" if apart else "equal to DDP's bit for bit"
    summary = f"first {number} losses, {tolerance.precision}: {how}"
    if apart <= tolerance.loss:
        return True, summary, ()
    by_itself = _apart(references[1]["ranks"], expected)[0] if len(references) > 1 else 0.0
    if by_itself > tolerance.loss:
        return None, f"twice under DDP the script's losses are {by_itself:.0e} apart: seed it to compare", ()
    return False, summary, (line,)


def _apart(ranks: Sequence[Rank], expected: Sequence[Rank]) -> tuple[float, str]:
    """Largest relative difference, and where it is."""
    worst, line = 0.0, ""
    for rank, other in zip(ranks, expected, strict=False):
        pairs = zip(rank["backward_losses"][:COMPARED], other["backward_losses"], strict=False)
        for place, (got, wanted) in enumerate(pairs, start=1):
            # Both may have ended up at no number, which is a word here.
            numbers = not isinstance(got, str) and not isinstance(wanted, str)
            off = relative(got, wanted) if numbers else 0.0 if got == wanted else math.inf
            if off > worst:
                worst = off
                line = f"loss {place} on rank {rank['rank']} is {got}, under DDP {wanted}: {off:.1e} apart"
    return worst, line


def _losses(ranks: Sequence[Rank]) -> tuple[str, ...]:
    """What the script logs itself: of each name the first and the last."""
    logged = [entry for rank in ranks for entry in rank.get("logged_losses", [])]
    by_key: dict[str, list[Mapping[str, Any]]] = {}
    for entry in logged:
        by_key.setdefault(entry["key"], []).append(entry)
    rows = [[key, str(len(found)), *(str(found[place]["value"]) for place in (0, -1))] for key, found in by_key.items()]
    return table(["logged by the script", "times", "first", "last"], rows) if rows else ()


_ON_RANK = re.compile(r"(.*) \(on rank (\d+)\)", re.DOTALL)


def causes(ranks: Sequence[Rank]) -> list[str]:
    """What stopped it, without what only follows from that."""
    errors = [rank["error"] for rank in ranks if "error" in rank]
    causes = [error for error in errors if error["code"] != "peer-lost"] or errors
    lines = [f"{cause['message']} ({cause['hint']})" if cause.get("hint") else cause["message"] for cause in causes]
    ranks_of: dict[str, list[str]] = {}
    for line in dict.fromkeys(lines):
        found = _ON_RANK.fullmatch(line)
        ranks_of.setdefault(found[1] if found else line, []).extend([found[2]] if found else [])
    return [
        f"{text} (on {'rank' if len(on) == 1 else 'ranks'} {', '.join(on)})" if on else text
        for text, on in sorted(ranks_of.items())
    ]


def is_low(ranks: Sequence[Rank]) -> bool:
    """Whether a model computed in 16 bits."""
    dtypes = {dtype for rank in ranks for model in rank.get("models", []) for dtype in model["compute_dtypes"] or ()}
    return bool(dtypes - {"float32", "float64"})
