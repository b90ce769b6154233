"""One process of a rehearsed script: somebody else's program, unmodified, and what can be seen of it from outside."""

import multiprocessing
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from accel_parallel.asked import Asked
from accel_parallel.errors import AccelParallelError, Problem
from accel_parallel.train.failure import crash, explain
from accel_parallel.train.script import enter_launch, run, wind_up
from accel_parallel.train.status import trace_of
from accel_parallel.train.watch_script import watching


@dataclass(frozen=True, slots=True)
class ScriptPart:
    """`words` is what stood after `--`; each process leaves what it saw in `folder`/rank-NN.json."""

    words: tuple[str, ...]
    folder: Path
    fsdp_in_script: bool
    keep_precision: bool


def rehearse_script(part: ScriptPart) -> dict[str, Any]:
    """Collective, as far as the script is. How it ended here: `{}`, or what stopped it and its traceback."""
    rank = int(os.environ.get("RANK", "0"))
    _redirect(part.folder, rank)
    # Workers of a DataLoader: a daemon may have no children, and only multiprocessing thinks that this is one.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    # As in a process that was not forked: how it starts others, and random numbers of its own (torch's are always of
    # one seed).
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    random.seed()
    np.random.seed()
    try:
        return _ended(part, rank)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _ended(part: ScriptPart, rank: int) -> dict[str, Any]:
    trace = None
    try:
        changed = enter_launch(True, part.keep_precision, fsdp_in_script=part.fsdp_in_script, quiet=True)
        module = part.words[0] == "-m"
        name, *arguments = part.words[1:] if module else part.words
        with watching(part.folder, Asked.from_environment(os.environ), changed):
            run(name, arguments, as_module=module)
        wind_up(0)
        return {}
    except SystemExit as end:
        if end.code in (None, 0):
            wind_up(0)
            return {}
        how = f"exit code {end.code}" if isinstance(end.code, int) else str(end.code)
        problem = Problem(f"the script ended with {how} (on rank {rank})", code="script")
    except AccelParallelError as error:
        problem = error.problems[0]
    except BaseException as error:  # torch raises some of its own that are no Exception
        known = explain(error, rank, None)
        problem = known.problems[0] if known else crash(error, rank, None)
        trace = trace_of(error)
    return {"error": problem.to_dict(), "traceback": trace}


def _redirect(folder: Path, rank: int) -> None:
    """The first process shows on the terminal what the script says, the others in a file; nothing is data."""
    # Of the process and not only of Python: torch's C++ has things to say too.
    log = 2 if rank == 0 else os.open(folder / f"log-{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
