"""Running a launch under supervision: every end of it becomes one message and one exit code.

The child is Accelerate's launcher inside `train.agent`. The workers tell what they know in files of a directory made
for the launch: `step-<rank>`, `pid-<rank>`, `error-<rank>.json`, `summary.json`; the agent adds `agent.json`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from accel_parallel.errors import Problem
from accel_parallel.launch import LOOP, LaunchPlan, launcher_environment

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a supervised launch ended."""

    exit_code: int
    summary: dict[str, Any] | None
    problems: list[Problem]
    traceback: str | None = None


def supervise(plan: LaunchPlan, announce: Callable[[], None] = lambda: None) -> Ended:
    """Run it to its end; `announce` is called when signals are taken care of and nothing is started yet.

    SIGTERM, SIGUSR1, SIGHUP and Ctrl-C stop the training loop after the current step, with a checkpoint; to a script
    they are passed on. A second Ctrl-C ends at once.
    """
    with tempfile.TemporaryDirectory(prefix="accel-parallel-") as name, _Signals(plan, Path(name)) as signals:
        status = Path(name)
        command = [sys.executable, "-m", "accel_parallel.train.agent", name, *plan.arguments("--status-dir", name)]
        killed_before = _killed_for_memory()
        announce()
        (status / "pid-launcher").write_text(str(os.getpid()), encoding="ascii")
        # A session of its own: the terminal's Ctrl-C reaches this process only, which passes it on as a request.
        child = subprocess.Popen(
            command, start_new_session=True, env=launcher_environment(os.environ, plan.num_processes)
        )
        while child.poll() is None and not signals.at_once:
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=0.2)
        if child.poll() is None:
            _end_group(child)
        return _ended(status, child.wait(), signals, _killed_for_memory() - killed_before)


class _Signals:
    """Turns signals of this process into requests to stop, and a second Ctrl-C into the end."""

    def __init__(self, plan: LaunchPlan, status: Path) -> None:
        self._own_loop = plan.module == LOOP
        self._status = status
        self._previous: dict[int, Any] = {}
        self.received: signal.Signals | None = None
        """The first one."""
        self.interrupted = False
        self.at_once = False
        self.trained = False
        """Whether a step had begun when the launch was ended at once."""

    def __enter__(self) -> "_Signals":
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.trained = any(_step(self._status, rank) for rank in _ranks(self._status, "step-"))
        if number == signal.SIGINT and self.interrupted:
            self.at_once = True
            return
        self.interrupted = self.interrupted or number == signal.SIGINT
        self.received = self.received or signal.Signals(number)
        again = "; Ctrl-C again ends at once" if number == signal.SIGINT else ""
        pids = [_number(self._status / f"pid-{rank}") for rank in _ranks(self._status, "pid-")]
        if self._own_loop and self.trained:
            (self._status / "stop").touch()
            self._say(f"stopping after the current step, with a checkpoint{again}")
        elif not self._own_loop and pids:
            for pid in filter(None, pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            self._say(f"{signal.Signals(number).name} passed on to the script{again}")
        else:
            self.at_once = True

    def _say(self, text: str) -> None:
        with suppress(OSError):
            os.write(2, f"\n{text}\n".encode())


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End the launcher at once; its workers die with it (agent.die_with_parent)."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=10)


def _ended(status: Path, returncode: int, signals: _Signals, killed_for_memory: int) -> Ended:
    summary = _read(status / "summary.json")
    agent = _read(status / "agent.json") or {}
    if signals.at_once:
        message = "ended at once; earlier checkpoints are as they were"
        if not signals.trained:
            message = "ended before the first step"
        return Ended(130, None, [Problem(message, code="interrupted")])
    if returncode == 0 and agent.get("ok"):
        # On several machines only the first has a summary.
        return Ended(130 if signals.interrupted else 0, summary, [])
    errors = {int(rank): error for rank in _ranks(status, "error-", ".json") if (error := _error(status, rank))}
    mute = _mute(agent.get("failures", []), errors, signals.received, killed_for_memory)
    told = sorted(errors.values(), key=_order)
    # What a worker says it knows best; then one that could say nothing any more; that it lost the others comes last.
    if told and (_order(told[0])[0] == 0 or not mute):
        problems = [Problem(**problem) for problem in told[0]["problems"]]
        return Ended(told[0]["exit_code"], summary, problems, told[0]["traceback"])
    if mute:
        return Ended(1, summary, [Problem(_worker_end(status, mute[0], killed_for_memory), code="worker")])
    if signals.received is not None:
        return Ended(130, summary, [Problem(f"ended by {signals.received.name}", code="interrupted")])
    if agent.get("message"):
        # Before anything was started: Accelerate does not take the file or its environment.
        return Ended(2, summary, [Problem(agent["message"], code="launcher")])
    end = f"was killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"exit code {returncode}"
    return Ended(1, summary, [Problem(f"the launcher ended without a result: {end}", code="launcher")])


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


def _worker_end(status: Path, failure: dict[str, int], killed_for_memory: int) -> str:
    code, rank = failure["exit_code"], failure["rank"]
    step = _step(status, str(rank))
    where = f" at step {step}" if step else ""
    if code < 0:
        why = " (the kernel ended it: out of memory)" if -code == signal.SIGKILL and killed_for_memory else ""
        return f"rank {rank} was killed by {signal.Signals(-code).name}{where}{why}"
    return f"rank {rank} ended with exit code {code}{where} without saying why"


def _killed_for_memory() -> int:
    """Processes that the kernel has killed for want of memory, since it started; proc(5), /proc/vmstat."""
    with suppress(OSError):
        match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(encoding="ascii"), re.MULTILINE)
        return int(match[1]) if match else 0
    return 0


def _ranks(status: Path, prefix: str, suffix: str = "") -> list[str]:
    return sorted(p.name.removeprefix(prefix).removesuffix(suffix) for p in status.glob(f"{prefix}[0-9]*{suffix}"))


def _step(status: Path, rank: str) -> int:
    return _number(status / f"step-{rank}") or 0


def _number(path: Path) -> int | None:
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
