"""What a rehearsal asks of a file, and the answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """One question. `holds` is None where nothing could be seen, and `summary` says why."""

    name: str
    question: str
    holds: bool | None
    summary: str
    mismatches: tuple[str, ...] = ()
    """One line each: asked, got, what to do."""
    table: tuple[str, ...] = ()
    """What was seen, for a person."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "question": self.question,
            "holds": self.holds,
            "summary": self.summary,
            "mismatches": list(self.mismatches),
        }


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One file rehearsed. `facts` is what was seen, as the processes told it."""

    name: str
    title: str
    checks: Sequence[Check]
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def holds(self) -> bool:
        """Whether nothing is otherwise than asked, and something was seen at all."""
        answers = [check.holds for check in self.checks]
        return True in answers and False not in answers

    @property
    def mismatches(self) -> list[str]:
        return [line for check in self.checks for line in check.mismatches]

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "holds": self.holds,
            "seconds": self.seconds,
            "checks": [check.to_dict() for check in self.checks],
            "notes": list(self.notes),
            "facts": self.facts,
        }


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> tuple[str, ...]:
    """Lines with aligned columns: the first `left` to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return tuple(map(line, (header, *rows)))
