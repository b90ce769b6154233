"""Running one generation of a launch under supervision, to an end of which nothing is left behind.

The child is Accelerate's launcher inside `train.agent`; `ended` reads what it and the workers tell.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from accel_parallel.ended import Ended, Requests, ended_at_once, ranks, read_end, read_number, step_of
from accel_parallel.launch import LOOP, LaunchPlan, launcher_environment

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Signals:
    """Turns signals of this process into requests to stop, and a second Ctrl-C into the end.

    SIGTERM, SIGUSR1, SIGHUP and Ctrl-C stop the training loop after the current step, with a checkpoint; to a script
    they are passed on. Where no generation of the launch runs, they end it at once.
    """

    def __init__(self) -> None:
        self.requests = Requests()
        self._status: Path | None = None
        self._own_loop = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def reach(self, status: Path, *, own_loop: bool) -> Iterator[None]:
        """Meanwhile the workers that report to `status` are the ones to tell; `own_loop` false for a script's."""
        self._own_loop, self._status = own_loop, status
        try:
            yield
        finally:
            self._trains()
            self._status = None

    def _trains(self) -> bool:
        """Whether the generation that runs has begun a step; one that has is remembered."""
        status = self._status
        trains = status is not None and any(step_of(status, rank) for rank in ranks(status, "step-"))
        self.requests.trained = self.requests.trained or trains
        return trains

    def _handle(self, number: int, frame: FrameType | None) -> None:
        requests, status, trains = self.requests, self._status, self._trains()
        if number == signal.SIGINT and requests.interrupted:
            requests.at_once = True
            return
        requests.interrupted = requests.interrupted or number == signal.SIGINT
        requests.received = requests.received or signal.Signals(number)
        again = "; Ctrl-C again ends at once" if number == signal.SIGINT else ""
        pids = [read_number(status / f"pid-{rank}") for rank in ranks(status, "pid-")] if status else []
        if status is not None and self._own_loop and trains:
            (status / "stop").touch()
            self._say(f"stopping after the current step, with a checkpoint{again}")
        elif not self._own_loop and pids:
            for pid in filter(None, pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            self._say(f"{signal.Signals(number).name} passed on to the script{again}")
        else:
            requests.at_once = True

    def _say(self, text: str) -> None:
        with suppress(OSError):
            os.write(2, f"\n{text}\n".encode())


def supervise(plan: LaunchPlan, signals: Signals) -> Ended:
    """Run it to its end, which comes at once if it was asked for before."""
    requests = signals.requests
    with (
        tempfile.TemporaryDirectory(prefix="accel-parallel-") as name,
        signals.reach(Path(name), own_loop=plan.module == LOOP),
    ):
        status = Path(name)
        command = [sys.executable, "-m", "accel_parallel.train.agent", name, *plan.arguments("--status-dir", name)]
        killed_before = _killed_for_memory()
        (status / "pid-launcher").write_text(str(os.getpid()), encoding="ascii")
        if requests.at_once:
            return ended_at_once(requests)
        # A session of its own: the terminal's Ctrl-C reaches this process only, which passes it on as a request.
        child = subprocess.Popen(
            command, start_new_session=True, env=launcher_environment(os.environ, plan.num_processes)
        )
        while child.poll() is None and not requests.at_once:
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=0.2)
        if child.poll() is None:
            _end_group(child)
        return read_end(status, child.wait(), requests, _killed_for_memory() - killed_before)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End the launcher at once; its workers die with it (agent.die_with_parent)."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=10)


def _killed_for_memory() -> int:
    """Processes that the kernel has killed for want of memory, since it started; proc(5), /proc/vmstat."""
    with suppress(OSError):
        match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(encoding="ascii"), re.MULTILINE)
        return int(match[1]) if match else 0
    return 0
