"""Worker processes of a job without the seconds that starting Python and importing torch cost.

A fork server imports torch and accelerate once; each worker is forked from it.
"""

import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

from accel_parallel.train.agent import die_with_parent

PRELOADED = "accel_parallel.train.preload"
GRACE_SECONDS = 5
"""How long the others of a job may go on after one of its processes has failed."""

ENDED_WITH_OTHERS = "ended with the others"

Answer = tuple[str, Any]
"""("ok", what the function returned) or ("error", a traceback, or how the process ended)."""


@cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    return context


def warm_up() -> None:
    """Let the fork server begin to import; nothing is waited for."""
    _context()
    forkserver.ensure_running()


@dataclass(slots=True)
class Job:
    """The processes of one job, in rank order, begun and not waited for."""

    processes: list[Any] = field(default_factory=list)
    receivers: list[Connection] = field(default_factory=list)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def results(self, timeout: float, failed: Callable[[Any], bool] = lambda value: False) -> list[Answer]:
        """Wait until all have answered, at most `timeout` seconds; no process is left.

        After the first error the others get a few seconds: they may wait for the failed one for ever. `failed` says
        what that a function returned is one too.
        """
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(self.processes):
            waiting = {receiver: rank for rank, receiver in enumerate(self.receivers) if rank not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for receiver in ready:
                assert isinstance(receiver, Connection)
                answers[waiting[receiver]] = self._answer(waiting[receiver], receiver)
            if any(kind == "error" or failed(value) for kind, value in answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        error = any(kind == "error" or failed(value) for kind, value in answers.values())
        silent = ("error", ENDED_WITH_OTHERS if error else f"no answer in {timeout:.0f} s")
        self.end()
        return [answers.get(rank, silent) for rank in range(len(self.processes))]

    def end(self) -> None:
        """Kill what still runs a few seconds after it has answered, and whatever it started."""
        for process in self.processes:
            process.join(1)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # It may not have come to lead a group.
            process.kill()
            process.join()

    def _answer(self, rank: int, receiver: Connection) -> Answer:
        try:
            kind, value = receiver.recv()
        except EOFError:
            self.processes[rank].join()
            return "error", f"process ended with exit code {self.processes[rank].exitcode}"
        return kind, value


def start_job(
    function: Callable[..., Any],
    environment: Mapping[str, str],
    world_size: int,
    arguments: Sequence[Any] = (),
    *,
    machines: int = 1,
    ranked: bool | None = None,
) -> Job:
    """Begin to call `function(*arguments)` in `world_size` processes that share `environment`, as torchrun would.

    The function has to be one that can be imported. All "machines" are this one. `ranked` is whether they are told
    their ranks: by default if there are several.
    """
    port, job, local_size = free_port(), Job(), world_size // machines
    for rank in range(world_size):
        world = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % local_size),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(local_size),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
        receiver, sender = _context().Pipe(duplex=False)
        whole = {**environment, **(world if (world_size > 1 if ranked is None else ranked) else {})}
        process = _context().Process(target=_run, args=(sender, whole, function, tuple(arguments)), daemon=True)
        process.start()
        sender.close()
        job.processes.append(process)
        job.receivers.append(receiver)
    return job


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def _run(sender: Connection, environment: dict[str, str], function: Callable[..., Any], arguments: Any) -> None:
    # The fork server ends when whoever started it does, if no worker holds the other end of the pipe that tells it so.
    server: Any = forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None
    die_with_parent(signal.SIGKILL)
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    answer: Answer
    try:
        answer = ("ok", function(*arguments))
    except BaseException:
        answer = ("error", traceback.format_exc())
    sender.send(answer)
    sender.close()
    # Not a return: a gloo group that is freed may hang (see `_NEVER_FREED` in the runtime).
    os._exit(0)
