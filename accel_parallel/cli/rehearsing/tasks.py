"""What the heavy half of a rehearsal is given, and what it answers: tasks and facts, in a folder."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from accel_parallel.accelerate_yaml import loads, names_a_file
from accel_parallel.cli.heavy import call_heavy
from accel_parallel.cli.target import Target
from accel_parallel.errors import LaunchError, RunError
from accel_parallel.files import write_atomic
from accel_parallel.rehearsal.check import Rehearsal
from accel_parallel.rehearsal.judge import refused
from accel_parallel.spec import RunSpec, dump_spec
from accel_parallel.strategies import STRATEGIES

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Work:
    """One launch to rehearse; `accel_parallel.train.rehearse.task.Task` is its other side."""

    name: str
    config: str
    spec: RunSpec
    reference: bool = False
    keep_precision: bool = False
    script: tuple[str, ...] = ()
    fsdp_in_script: bool = False

    def task(self, folder: Path) -> dict[str, Any]:
        """Its files, and the task that names them."""
        folder.mkdir()
        (folder / "accelerate.yaml").write_text(self.config, encoding="utf-8")
        (folder / "spec.yaml").write_text(dump_spec(self.spec), encoding="utf-8")
        return {
            "folder": folder.name,
            "name": self.name,
            "processes": self.spec.num_processes,
            "machines": self.spec.distributed.num_machines,
            "reference": self.reference,
            "keep_precision": self.keep_precision,
            "script": self.script,
            "fsdp_in_script": self.fsdp_in_script,
        }


def carry_out(works: Sequence[Work], folder: Path) -> list[Facts]:
    """One pool of processes does them all, one after the other; the facts of each. `folder` is an empty one."""
    if not works:
        return []
    places = [folder / f"{number:02d}" for number in range(len(works))]
    tasks = [work.task(place) for work, place in zip(works, places, strict=True)]
    write_atomic(folder / "tasks.json", json.dumps(tasks))
    code = call_heavy("rehearse", [str(folder)])
    return [_facts(place, code) for place in places]


def file_of(target: Target) -> str:
    """Its text, with the number of processes that the command line gives instead of it."""
    config = loads(target.config)
    if config.get("num_processes") == target.spec.num_processes or target.spec.num_processes == 1:
        return target.config
    return yaml.safe_dump({**config, "num_processes": target.spec.num_processes}, sort_keys=False)


def found_or_refused(name: str, find: Callable[[str], Target]) -> Target | Rehearsal:
    """The target, or what is wrong with the file before anything can start."""
    try:
        return find(name)
    except LaunchError as error:
        if name in STRATEGIES or not names_a_file(name):
            raise
        return refused(Path(name).stem, error)


def in_order(found: Sequence[Target | Rehearsal], rehearsed: Sequence[Rehearsal]) -> list[Rehearsal]:
    """What was refused, and what was rehearsed in the place of its target."""
    rest = iter(rehearsed)
    return [each if isinstance(each, Rehearsal) else next(rest) for each in found]


def _facts(folder: Path, code: int) -> Facts:
    try:
        facts: Facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise RunError(f"the rehearsal ended without a result: {how}") from None
    return facts
