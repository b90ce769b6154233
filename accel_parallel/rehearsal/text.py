"""Rehearsals for a terminal: the answers, and of a single file what was seen."""

from collections.abc import Sequence
from textwrap import wrap

from accel_parallel.rehearsal.check import Rehearsal

WIDTH = 79


def lines(rehearsals: Sequence[Rehearsal]) -> list[str]:
    """One block a rehearsal: its verdict, an answer to each question, and every mismatch."""
    found: list[str] = []
    for rehearsal in rehearsals:
        found += _block(rehearsal, detailed=len(rehearsals) == 1)
    if len(rehearsals) > 1:
        bad = [rehearsal.name for rehearsal in rehearsals if not rehearsal.holds]
        seconds = sum(rehearsal.seconds for rehearsal in rehearsals)
        verdict = f"not as asked: {', '.join(bad)}" if bad else "all as asked"
        found += _wrapped(f"{len(rehearsals)} rehearsed in {seconds:.0f} s, {verdict}", "", "  ")
    return found


def _block(rehearsal: Rehearsal, *, detailed: bool) -> list[str]:
    found = []
    if detailed:
        for check in rehearsal.checks:
            if check.table:
                found += [check.question, *(line for text in check.table for line in _indented(text)), ""]
    verdict = "as asked" if rehearsal.holds else "NOT as asked"
    found += _wrapped(f"{rehearsal.title}: {verdict} ({rehearsal.seconds:.0f} s)", "", "  ")
    for check in rehearsal.checks:
        if check.holds is not None:
            found += _wrapped(
                f"  {check.question:28} {'yes' if check.holds else 'NO':3}  {check.summary}", "", " " * 36
            )
        for mismatch in check.mismatches:
            found += _wrapped(mismatch, "    - ", "      ")
    unseen: dict[str, list[str]] = {}
    for check in rehearsal.checks:
        if check.holds is None:
            unseen.setdefault(check.summary, []).append(check.question)
    for reason, questions in unseen.items():
        found += _wrapped(f"{' '.join(questions)} not seen: {reason}", "  ", "    ")
    return [*found, *(f"  {note}" for note in rehearsal.notes), *([] if detailed else [""])]


def _indented(text: str) -> list[str]:
    # A row of a table is as wide as it is.
    return [f"  {text}".rstrip()] if len(text) < WIDTH - 1 else _wrapped(text, "  ", "      ")


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, drop_whitespace=True) or [""]
