"""Loaded by every Python process of a launch whose PYTHONPATH holds this folder: lets one worker fail at a step.

FAULT is "<kind> <rank> <step>". Of kind "deaf" the rank exits and the others hear no SIGTERM, of kind "frozen" it is
killed and the others stop until they are continued. Several ranks, as in "1,0", fail in turn; "+2" is the second step
that a process takes. The time of each fault is a line of the file that FAULT_TIME names, and with FAULT_COUNT there are
no more of them. FAULT_SABOTAGE names what is wrong with the workers once one has failed (see tests/sabotage.py).
"""

import os
import signal
import time
from pathlib import Path
from typing import Any


def install() -> None:
    from accel_parallel.train.control import Control

    kind, ranks, step = os.environ["FAULT"].split()
    times = Path(os.environ["FAULT_TIME"])
    happened = len(times.read_text().splitlines()) if times.exists() else 0
    if happened >= int(os.environ.get("FAULT_COUNT", "1000")):
        return
    failing = ranks.split(",")[happened % len(ranks.split(","))]
    begin, begun = Control.begin, 0

    def faulty(control: Control, at: int) -> None:
        nonlocal begun
        begin(control, at)
        begun += 1
        if int(step) != (begun if step.startswith("+") else at):
            return
        if os.environ.get("RANK", "0") == failing:
            with times.open("a") as file:
                file.write(f"{time.time()}\n")
            fail(kind)
        elif kind in ("deaf", "frozen"):
            os.kill(os.getpid(), signal.SIGSTOP)

    Control.begin = faulty  # type: ignore[method-assign]


def fail(kind: str) -> None:
    if kind == "raise":
        raise KeyError("a key that nobody has")
    if kind in ("exit", "deaf"):
        os._exit(7)
    if kind in ("kill", "frozen"):
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "memory":
        import torch

        torch.empty(2**60, dtype=torch.uint8)


def install_after_the_end() -> None:
    """A worker is killed when everything is saved, and nothing is summed up yet."""
    import accel_parallel.train.session as session

    def summarize(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    session.summarize = summarize  # type: ignore[assignment]


if os.environ.get("FAULT", "").startswith("end "):
    if "RANK" in os.environ:
        install_after_the_end()
elif "FAULT" in os.environ:
    install()
if "RANK" in os.environ and "FAULT_SABOTAGE" in os.environ and Path(os.environ["FAULT_TIME"]).exists():
    from tests import sabotage

    sabotage.apply(os.environ["FAULT_SABOTAGE"])
