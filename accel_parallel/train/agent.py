"""`accelerate launch`, told to end in order: `python -m accel_parallel.train.agent STATUS_DIR ARGUMENTS...`.

Accelerate's own command ends every failed worker with a traceback of the launcher and exit code 1. This one runs the
same code and writes `agent.json`: which rank failed first, and how.
"""

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

SECONDS_TO_END = 8
AGENT = "pid-agent"
LAUNCHER = "pid-launcher"


def die_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Let the kernel send this process `number` when its parent dies, so that no launch leaves orphans. Linux only.

    prctl(2), PR_SET_PDEATHSIG = 1. The elastic launcher starts workers in sessions of their own, which no signal to
    its process group reaches. `parent` is who it was to be: if that one died before, nobody else will tell.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def read_pid(path: Path) -> int | None:
    """The process id in a file, None if there is none."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def hear_no_signals() -> None:
    """A scheduler sends its signals to every process of a job. The workers and the launcher answer them, not the agent.

    A handler that does nothing, and not SIG_IGN, which the workers would inherit.
    """
    from torch.distributed.elastic.multiprocessing import api

    def nothing(signum: int, frame: FrameType | None) -> None: ...

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, nothing)
    # torch would install its own, which ends the workers, when it starts them.
    api._terminate_process_handler = nothing


def end_workers(*, at_once: bool) -> None:
    """After one worker has failed, the others are killed: `at_once`, or 8 s after SIGTERM; torch's own is 30 s.

    To the workers of the training loop SIGTERM is a request to stop in order, which they could not agree on any more.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext

    original = PContext.close

    def close(context: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        original(context, signal.SIGKILL if at_once else death_sig, min(timeout, SECONDS_TO_END))

    PContext.close = close  # type: ignore[method-assign,assignment]


def join_fresh_stores() -> None:
    """Of several machines, one that starts again waits until the first has started again too.

    The first machine's agent holds the store in which all meet, at an address that never changes. As long as it has not
    seen that its generation is lost, its store is the old one: what it says of workers is true no more.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous import RendezvousInfo
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    original = StaticTCPRendezvous.next_rendezvous

    def is_fresh(meeting: RendezvousInfo) -> bool:
        try:
            return meeting.store.add(f"accel_parallel/joined/{meeting.rank}", 1) == 1
        except DistError:  # its agent ended just now
            return False

    def next_rendezvous(rendezvous: StaticTCPRendezvous) -> RendezvousInfo:
        deadline = time.monotonic() + rendezvous.timeout.total_seconds()
        while not is_fresh(meeting := original(rendezvous)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the first machine did not start again within {rendezvous.timeout.seconds} s")
            rendezvous._store = None
            time.sleep(1)
        return meeting

    StaticTCPRendezvous.next_rendezvous = next_rendezvous  # type: ignore[method-assign,assignment]


def main(argv: list[str]) -> int:
    status, arguments = Path(argv[0]), argv[1:]
    die_with_parent(signal.SIGKILL, read_pid(status / LAUNCHER))
    (status / AGENT).write_text(str(os.getpid()), encoding="ascii")
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # What the elastic agent has to say about failures is in its exception; the launcher words it once.
    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    hear_no_signals()
    end_workers(at_once="accel_parallel.train.script" not in arguments)
    join_fresh_stores()
    report: dict[str, Any] = {"ok": True}
    try:
        launch_command(launch_command_parser().parse_args(arguments))
    except ChildFailedError as error:
        failures = [{"rank": rank, "exit_code": failure.exitcode} for rank, failure in error.failures.items()]
        report = {"ok": False, "failures": failures}
    except subprocess.CalledProcessError as error:
        report = {"ok": False, "failures": [{"rank": 0, "exit_code": error.returncode}]}
    except Exception as error:  # whatever it is, the launcher says it in one line
        report = {"ok": False, "failures": [], "message": f"{type(error).__name__}: {error}"}
    (status / "agent.json").write_text(json.dumps(report), encoding="utf-8")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
