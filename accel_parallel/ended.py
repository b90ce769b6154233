"""How a launch ended: what workers and launcher left in the status directory becomes one message and one exit code.

The workers tell what they know in files of a directory made for them: `step-<rank>`, `pid-<rank>`, `error-<rank>.json`,
`summary.json`; the agent adds `agent.json`.
"""

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_parallel.errors import Problem


@dataclass(frozen=True, slots=True)
class Ended:
    """How a supervised launch ended."""

    exit_code: int
    summary: dict[str, Any] | None
    problems: list[Problem]
    traceback: str | None = None
    restartable: bool = False
    """Whether it failed of something that need not happen again: nobody asked for it, and no cause is known."""
    restarts: int = 0
    """How many there were before this end."""


@dataclass(slots=True)
class Requests:
    """What signals have asked of a launch."""

    received: signal.Signals | None = None
    """The first one."""
    interrupted: bool = False
    at_once: bool = False
    trained: bool = False
    """Whether a step had begun, in any generation, when the last one came."""


def ended_at_once(requests: Requests) -> Ended:
    """The end of a launch that was not waited for."""
    by = f" by {requests.received.name}" if requests.received else ""
    message = (
        f"ended at once{by}; earlier checkpoints are as they were"
        if requests.trained
        else f"ended{by} before the first step; nothing was trained"
    )
    return Ended(130, None, [Problem(message, code="interrupted")])


def read_end(status: Path, returncode: int, requests: Requests, killed_for_memory: int) -> Ended:
    """The end of one generation, of whose launcher this is the return code.

    `killed_for_memory` is how many processes the kernel has killed meanwhile for want of memory.
    """
    if requests.at_once:
        return ended_at_once(requests)
    summary = _read(status / "summary.json")
    agent = _read(status / "agent.json") or {}
    if returncode == 0 and agent.get("ok"):
        # On several machines only the first has a summary.
        return Ended(130 if requests.interrupted else 0, summary, [])
    errors = {int(rank): error for rank in ranks(status, "error-", ".json") if (error := _error(status, rank))}
    mute = _mute(agent.get("failures", []), errors, requests.received, killed_for_memory)
    told = sorted(errors.values(), key=_order)
    # What a worker says it knows best; then one that could say nothing any more; that it lost the others comes last.
    if told and (_order(told[0])[0] == 0 or not mute):
        problems, trace = [Problem(**problem) for problem in told[0]["problems"]], told[0]["traceback"]
        return Ended(told[0]["exit_code"], summary, problems, trace, restartable=trace is not None)
    if mute:
        problem = Problem(_worker_end(status, mute[0], killed_for_memory), code="worker")
        return Ended(1, summary, [problem], restartable=not any(_for_memory(end, killed_for_memory) for end in mute))
    if requests.received is not None:
        return Ended(130, summary, [Problem(f"ended by {requests.received.name}", code="interrupted")])
    if agent.get("message"):
        # Before anything was started: Accelerate does not take the file or its environment.
        return Ended(2, summary, [Problem(agent["message"], code="launcher")])
    end = f"was killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"exit code {returncode}"
    problem = Problem(f"the launcher ended without a result: {end}", code="launcher")
    return Ended(1, summary, [problem], restartable=returncode < 0 and not killed_for_memory)


def _mute(
    failures: list[dict[str, int]],
    errors: dict[int, dict[str, Any]],
    received: signal.Signals | None,
    killed_for_memory: int,
) -> list[dict[str, int]]:
    """Who ended without a word and of its own, in the order in which the launcher saw it.

    SIGTERM is how the launcher ends the others once one has failed, and SIGKILL if they do not obey.
    """
    asked = {-signal.SIGTERM} | ({-received, 128 + received} if received else set())
    mute, crashed = [], False
    for failure in failures:
        rank, code = failure["rank"], failure["exit_code"]
        if rank in errors:
            crashed = crashed or _order(errors[rank])[0] == 1
        elif code not in asked and not (crashed and code == -signal.SIGKILL and not killed_for_memory):
            mute.append(failure)
    return mute


def _order(error: dict[str, Any]) -> tuple[int, float]:
    """Known causes first, then crashes, then what is only a consequence; in each the earliest."""
    consequence = any(problem["code"] == "peer-lost" for problem in error["problems"])
    return (2 if consequence else 0 if error["traceback"] is None else 1), error["time"]


def _for_memory(failure: dict[str, int], killed_for_memory: int) -> bool:
    return bool(killed_for_memory) and failure["exit_code"] == -signal.SIGKILL


def _worker_end(status: Path, failure: dict[str, int], killed_for_memory: int) -> str:
    code, rank = failure["exit_code"], failure["rank"]
    step = step_of(status, str(rank))
    where = f" at step {step}" if step else ""
    if code < 0:
        why = " (the kernel ended it: out of memory)" if _for_memory(failure, killed_for_memory) else ""
        return f"rank {rank} was killed by {signal.Signals(-code).name}{where}{why}"
    return f"rank {rank} ended with exit code {code}{where} without saying why"


def ranks(status: Path, prefix: str, suffix: str = "") -> list[str]:
    """The ranks that have such a file."""
    return sorted(p.name.removeprefix(prefix).removesuffix(suffix) for p in status.glob(f"{prefix}[0-9]*{suffix}"))


def step_of(status: Path, rank: str) -> int:
    """The step that a rank computes, or computed last; 0 before the first."""
    return read_number(status / f"step-{rank}") or 0


def read_number(path: Path) -> int | None:
    """The number in a file, None if there is none."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _error(status: Path, rank: str) -> dict[str, Any] | None:
    return _read(status / f"error-{rank}.json")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
