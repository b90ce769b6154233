"""Loaded by every Python process of a launch whose PYTHONPATH holds this folder: lets one worker fail at a step.

FAULT is "<kind> <rank> <step>"; of kind "deaf" the rank exits and the others hear no SIGTERM. The time of the fault is
written to the file that FAULT_TIME names.
"""

import os
import signal
import time
from pathlib import Path


def install() -> None:
    from accel_parallel.train.control import Control

    kind, rank, step = os.environ["FAULT"].split()
    begin = Control.begin

    def faulty(control: Control, at: int) -> None:
        begin(control, at)
        if at != int(step):
            return
        if os.environ.get("RANK", "0") == rank:
            Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))
            fail(kind)
        elif kind == "deaf":
            os.kill(os.getpid(), signal.SIGSTOP)

    Control.begin = faulty  # type: ignore[method-assign]


def fail(kind: str) -> None:
    if kind == "raise":
        raise KeyError("a key that nobody has")
    if kind in ("exit", "deaf"):
        os._exit(7)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "memory":
        import torch

        torch.empty(2**60, dtype=torch.uint8)


if "FAULT" in os.environ:
    install()
