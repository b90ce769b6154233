"""`accelerate launch`, told to end in order: `python -m accel_parallel.train.agent STATUS_DIR ARGUMENTS...`.

Accelerate's own command ends every failed worker with a traceback of the launcher and exit code 1. This one runs the
same code and writes `agent.json`: which rank failed first, and how.
"""

import ctypes
import json
import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

SECONDS_TO_END = 8


def die_with_parent(number: signal.Signals) -> None:
    """Let the kernel send this process `number` when its parent dies, so that no launch leaves orphans. Linux only.

    prctl(2), PR_SET_PDEATHSIG = 1. The elastic launcher starts workers in sessions of their own, which no signal to
    its process group reaches.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)


def end_workers_within(seconds: int) -> None:
    """After one worker has failed, the others get SIGTERM and, that many seconds later, SIGKILL. torch's own is 30."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    original = PContext.close

    def close(context: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        original(context, death_sig, min(timeout, seconds))

    PContext.close = close  # type: ignore[method-assign,assignment]


def main(argv: list[str]) -> int:
    die_with_parent(signal.SIGTERM)
    status, arguments = Path(argv[0]), argv[1:]
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # What the elastic agent has to say about failures is in its exception; the launcher words it once.
    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    end_workers_within(SECONDS_TO_END)
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
