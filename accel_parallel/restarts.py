"""Restarts: a launch that fails of something that need not happen again is started again, without a person.

Each generation has a launcher process of its own, and on one machine a port of its own: the generations that
Accelerate's launcher starts by itself (`--max_restarts`) share one store, in which the workers of the next can meet the
addresses of dead ones (seen on accelerate 1.15, torch 2.13).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from accel_parallel.ended import Ended
from accel_parallel.errors import Problem
from accel_parallel.launch import LaunchPlan
from accel_parallel.supervise import Signals, supervise


@dataclass(frozen=True, slots=True)
class Restart:
    """One that is about to happen. `number` counts from 1."""

    number: int
    of: int
    ended: Ended
    """How the generation before it did."""

    def line(self, problems: Sequence[Problem], then: str) -> str:
        """What happened, and what comes."""
        return f"restart {self.number} of {self.of}: {'; '.join(map(str, problems))}; {then}"


def run_generations(
    plan: Callable[[], LaunchPlan],
    announce: Callable[[], None],
    again: Callable[[Restart], bool],
    max_restarts: int,
) -> Ended | None:
    """Run a launch to its end, in at most `max_restarts` generations more than one.

    `plan` tells how to start the next generation. `announce` is called once, when signals are taken care of and nothing
    is started yet; `again` before each restart: false if nothing is left to do, and then the result is None.
    """
    with Signals() as signals:
        first = plan()
        announce()
        ended = supervise(first, signals)
        for number in range(1, max_restarts + 1):
            if not ended.restartable or signals.requests.received:
                break
            if not again(Restart(number, max_restarts, ended)):
                return None
            ended = replace(supervise(plan(), signals), restarts=number)
    return _counted(ended)


def _counted(ended: Ended) -> Ended:
    """A failure says how many restarts did not help. A request to stop is none."""
    if not ended.restarts or ended.exit_code == 130:
        return ended
    after = f"after {ended.restarts} restart{'s' if ended.restarts > 1 else ''}"
    problems = [replace(problem, message=f"{problem.message}, {after}") for problem in ended.problems]
    return replace(ended, problems=problems)
