"""One file rehearsed: what Accelerate's launcher makes of it, and launches of the project's loop under that."""

import json
import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accel_parallel.errors import LaunchError
from accel_parallel.files import write_atomic
from accel_parallel.launch import without_traces
from accel_parallel.metrics import by_step, read_lines
from accel_parallel.say import say
from accel_parallel.spec import load_spec
from accel_parallel.train.pool import start_job
from accel_parallel.train.rehearse.drawn import draw_tokens
from accel_parallel.train.rehearse.worker import Part, rehearse_part
from accel_parallel.train.stations import launched, stations

SECONDS = 600
"""A launch of a few steps that has not answered by then hangs."""


@dataclass(frozen=True, slots=True)
class Task:
    """`folder` holds `accelerate.yaml` and `spec.yaml`. A reference is only trained, for others to compare with."""

    folder: Path
    name: str
    processes: int
    machines: int
    reference: bool
    keep_precision: bool


def run_task(task: Task, began: float) -> None:
    """Write `facts.json` into its folder; `began` is when its first seconds were spent."""
    say("trains the reference: one process" if task.reference else f"rehearses {task.name}")
    facts = {**_launches(task, began), "seconds": time.time() - began}
    write_atomic(task.folder / "facts.json", json.dumps(facts))


def _launches(task: Task, began: float) -> dict[str, Any]:
    config, spec = task.folder / "accelerate.yaml", load_spec(task.folder / "spec.yaml")
    facts: dict[str, Any] = {"refused": None, "stations": [], "ranks": [], "resumed": []}
    facts |= {"steps": {}, "steps_resumed": {}}
    try:
        launch = launched(config)
        facts["processes_started"] = launch.processes
        facts["stations"] = [] if task.reference else [station.to_dict() for station in stations(config)]
    except LaunchError as error:
        return {**facts, "refused": error.message}
    if launch.processes != task.processes:
        return facts
    data = draw_tokens(task.folder / "tokens", spec)
    run = task.folder / "run"
    first = Part(spec, data, run, look=not task.reference, keep_precision=task.keep_precision, began=began)
    environment = {**without_traces(os.environ), **launch.environment}
    facts["ranks"] = _launch(first, environment, task)
    facts["steps"] = _numbers(run)
    if not task.reference and not any("error" in rank for rank in facts["ranks"]):
        again = replace(first, run=_before_the_last_step(run), look=False, began=time.time())
        facts["resumed"] = _launch(again, environment, task)
        facts["steps_resumed"] = _numbers(again.run)
    return facts


def _launch(part: Part, environment: dict[str, str], task: Task) -> list[dict[str, Any]]:
    """What each process of the launch saw, in rank order."""
    job = start_job(rehearse_part, environment, task.processes, [part], machines=task.machines)
    ranks = []
    for rank, (kind, answer) in enumerate(job.results(SECONDS)):
        problem = {"message": answer, "code": "crash"}
        ranks.append(answer if kind == "ok" else {"rank": rank, "error": problem})
    return ranks


def _before_the_last_step(run: Path) -> Path:
    """The same run as if it had been stopped there: a copy with all checkpoints but the newest."""
    stopped = run.with_name("run-stopped")
    for checkpoint in sorted((run / "checkpoints").iterdir())[:-1]:
        shutil.copytree(checkpoint, stopped / "checkpoints" / checkpoint.name)
    return stopped


def _numbers(run: Path) -> dict[int, dict[str, float]]:
    """Loss and gradient norm by step."""
    rows = by_step(read_lines(run / "metrics.jsonl"), "train")
    return {step: {key: row[key] for key in ("loss", "grad_norm")} for step, row in rows.items()}
