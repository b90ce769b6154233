"""One file rehearsed: what Accelerate's launcher makes of it, and launches of the loop or of a script under that."""

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
from accel_parallel.train.pool import ENDED_WITH_OTHERS, Answer, start_job
from accel_parallel.train.rehearse.drawn import draw_tokens
from accel_parallel.train.rehearse.script import ScriptPart, rehearse_script
from accel_parallel.train.rehearse.worker import Part, rehearse_part
from accel_parallel.train.stations import Launch, launched, stations

SECONDS = 600
"""A launch of a few steps that has not answered by then hangs."""
SCRIPT_SECONDS = 10 * 24 * 3600
"""How long somebody's script takes is theirs to say; a wait has to have an end."""


@dataclass(frozen=True, slots=True)
class Task:
    """`folder` holds `accelerate.yaml` and `spec.yaml`. A reference is only run, for others to compare with.

    With `script`, what stood after `--`, that runs instead of the project's loop.
    """

    folder: Path
    name: str
    processes: int
    machines: int
    reference: bool
    keep_precision: bool
    script: tuple[str, ...] = ()
    fsdp_in_script: bool = False


def run_task(task: Task, began: float) -> None:
    """Write `facts.json` into its folder; `began` is when its first seconds were spent."""
    say(_doing(task))
    facts = {**_launches(task, began), "seconds": time.time() - began}
    write_atomic(task.folder / "facts.json", json.dumps(facts))


def _doing(task: Task) -> str:
    what = " ".join(task.script)
    if task.reference:
        return f"runs {what} under DDP, to compare with" if what else "trains the reference: one process"
    return f"rehearses {task.name}: {what}" if what else f"rehearses {task.name}"


def _launches(task: Task, began: float) -> dict[str, Any]:
    config = task.folder / "accelerate.yaml"
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
    environment = {**without_traces(os.environ), **launch.environment}
    if task.script:
        return {**facts, "environment": launch.environment, "ranks": _run_script(task, launch, environment)}
    spec, run = load_spec(task.folder / "spec.yaml"), task.folder / "run"
    data = draw_tokens(task.folder / "tokens", spec)
    first = Part(spec, data, run, look=not task.reference, keep_precision=task.keep_precision, began=began)
    facts["ranks"] = _launch(first, launch, environment, task)
    facts["steps"] = _numbers(run)
    if not task.reference and not any("error" in rank for rank in facts["ranks"]):
        again = replace(first, run=_before_the_last_step(run), look=False, began=time.time())
        facts["resumed"] = _launch(again, launch, environment, task)
        facts["steps_resumed"] = _numbers(again.run)
    return facts


def _launch(part: Part, launch: Launch, environment: dict[str, str], task: Task) -> list[dict[str, Any]]:
    """What each process of the launch saw, in rank order."""
    ranked, machines = launch.ranked, task.machines
    job = start_job(rehearse_part, environment, task.processes, [part], machines=machines, ranked=ranked)
    return [{"rank": rank, **_answer(rank, result)} for rank, result in enumerate(job.results(SECONDS, _failed))]


def _run_script(task: Task, launch: Launch, environment: dict[str, str]) -> list[dict[str, Any]]:
    """What was seen of the script in each process, in rank order, and how it ended there."""
    seen = task.folder / "seen"
    seen.mkdir()
    part = ScriptPart(task.script, seen, task.fsdp_in_script, task.keep_precision)
    ranked, machines = launch.ranked, task.machines
    job = start_job(rehearse_script, environment, task.processes, [part], machines=machines, ranked=ranked)
    answers = [_answer(rank, result) for rank, result in enumerate(job.results(SCRIPT_SECONDS, _failed))]
    trace = next((answer["traceback"] for answer in answers if answer.get("traceback")), None)
    if trace:
        say(trace.rstrip())
    return [{**_record(seen / f"rank-{rank:02d}.json"), "rank": rank, **answer} for rank, answer in enumerate(answers)]


def _record(path: Path) -> dict[str, Any]:
    """Empty if that process ended before it ran the script."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _failed(answer: dict[str, Any]) -> bool:
    return "error" in answer


def _answer(rank: int, result: Answer) -> dict[str, Any]:
    kind, answer = result
    if kind == "ok":
        return dict(answer)
    code = "peer-lost" if answer == ENDED_WITH_OTHERS else "crash"
    return {"error": {"message": f"{answer} (on rank {rank})", "code": code}}


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
