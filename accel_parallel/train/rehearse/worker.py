"""One process of a rehearsed launch: the project's loop, and what this process sees of it."""

import os
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accel_parallel.errors import AccelParallelError
from accel_parallel.runs import Run
from accel_parallel.spec import RunSpec
from accel_parallel.train.checkpoint import Checkpoints
from accel_parallel.train.control import Control
from accel_parallel.train.data import TokenData, TrainBatches
from accel_parallel.train.failure import crash, explain
from accel_parallel.train.loop import Outcome, train
from accel_parallel.train.probe import observe_step
from accel_parallel.train.report import Reporter
from accel_parallel.train.runtime import Runtime, describe
from accel_parallel.train.training_step import training_step
from accel_parallel.train.units import held_units, naming_units


@dataclass(frozen=True, slots=True)
class Part:
    """One launch of a rehearsal. `look` at a step after training, or only train."""

    spec: RunSpec
    data: TokenData
    run: Path
    look: bool
    keep_precision: bool
    began: float
    """`time.time()` when the processes were asked for."""


def rehearse_part(part: Part) -> dict[str, Any]:
    """Collective. What this process saw, or `{"error": ...}` with what stopped it, as `Problem.to_dict`."""
    rank = int(os.environ.get("RANK", "0"))
    part.run.mkdir(exist_ok=True)
    # Of the process and not only of Python: torch's C++ has things to say too.
    log = os.open(part.run / f"log-{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    warnings.simplefilter("ignore")
    control = Control()
    try:
        return _rehearse(part, control)
    except AccelParallelError as error:
        problems = error.problems
    except BaseException as error:  # torch raises some of its own that are no Exception
        known = explain(error, rank, control.step)
        problems = known.problems if known else [crash(error, rank, control.step)]
    return {"rank": rank, "error": problems[0].to_dict()}


def _rehearse(part: Part, control: Control) -> dict[str, Any]:
    runtime = Runtime.start(part.spec, force_cpu=True, keep_precision=part.keep_precision)
    run = Run(part.run, continues=True)
    checkpoints = Checkpoints(run, runtime, part.data.fingerprint)
    reporter = Reporter(
        run, total_steps=runtime.spec.training.steps, active=runtime.is_main, track=_untracked, environment=dict
    )
    with reporter:
        outcome = train(runtime, part.data, checkpoints, reporter, control)
    facts = {"rank": runtime.rank, "seconds": time.time() - part.began, **describe(runtime)}
    if part.look:
        facts |= {"units": [unit.to_dict() for unit in held_units(outcome.model)], **_cost(runtime, part.data, outcome)}
    return facts


def _cost(runtime: Runtime, data: TokenData, outcome: Outcome) -> dict[str, Any]:
    """Collective. What a step costs this process."""
    spec = runtime.spec
    batches = TrainBatches(data, spec.model.seq_len, spec.training, runtime.rank, runtime.world_size)
    step = training_step(runtime, outcome.model, outcome.optimizer, *batches.step(0)[-1])
    cost = observe_step(outcome.model, outcome.optimizer, step, naming=partial(naming_units, outcome.model))
    seen = cost.to_dict()
    return {"traffic": seen["traffic"], "units_traffic": seen["units"], "memory": seen["memory"]}


def _untracked(numbers: dict[str, Any], step: int) -> None:
    return None
