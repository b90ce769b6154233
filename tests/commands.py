"""The commands a user types, started for real, and a look at the processes they leave or do not leave."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_parallel.metrics import by_step, read_lines

BIN = Path(sys.executable).parent
TIMEOUT = 180


def command(arguments: Sequence[str], cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT, check=False,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "COLUMNS": "80", **(env or {})},
    )  # fmt: skip


def launch(cwd: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return command([str(BIN / "accel-parallel"), "launch", *arguments], cwd, env)


def start(cwd: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """`accel-parallel launch`, not waited for."""
    return subprocess.Popen(
        [str(BIN / "accel-parallel"), "launch", *arguments],
        cwd=cwd, **{"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, **options},
    )  # fmt: skip


def set_options(sets: Sequence[str]) -> list[str]:
    return [part for entry in sets for part in ("--set", entry)]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in by_step(read_lines(run / "metrics.jsonl"), "train").values()]


def errors(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("error: ")]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


def faulty(kind: str, rank: str, step: str, times: Path, **variables: str) -> dict[str, str]:
    """The environment of a launch in which a worker fails: see tests/faults/sitecustomize.py."""
    path = os.pathsep.join((str(Path(__file__).parent / "faults"), str(Path(__file__).parent.parent)))
    return {"FAULT": f"{kind} {rank} {step}", "FAULT_TIME": str(times), "PYTHONPATH": path, **variables}


def make_home(folder: Path, toy: Sequence[str]) -> Path:
    """A folder as a user has it: the specification of a toy run and the files generated from it."""
    import re

    result = command([str(BIN / "accel-parallel"), "config"], folder)
    assert result.returncode == 0, result.stderr
    spec = folder / "accelerate_configs/parallelism.yaml"
    edited = spec.read_text()
    for entry in toy:
        key, value = entry.split("=", 1)
        section, name = key.split(".")
        pattern = rf"(?ms)(^{section}:.*?\n)  #? ?{name}: \S+"
        edited, count = re.subn(pattern, rf"\g<1>  {name}: {value}", edited, count=1)
        assert count == 1, key
    spec.write_text(edited)
    assert command([str(BIN / "accel-parallel"), "config", "--check"], folder).returncode == 1
    assert command([str(BIN / "accel-parallel"), "config"], folder).returncode == 0
    return folder


def wait_for_steps(run: Path, steps: int = 3) -> None:
    """Until training reported that many steps."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (run / "metrics.jsonl").exists() and len(losses(run)) >= steps:
            return
        time.sleep(0.2)
    raise AssertionError(f"training in {run} did not begin")


def workers_of(word: str) -> list[int]:
    """The process ids of the workers, by rank, on whose command line `word` stands."""
    ranks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
                variables = dict(
                    item.split(b"=", 1) for item in (entry / "environ").read_bytes().split(b"\0") if b"=" in item
                )
            except OSError:
                continue
            modules = {b"accel_parallel.train", b"accel_parallel.train.script"}
            is_worker = modules & set(arguments) and b"accel_parallel.train.agent" not in arguments
            if is_worker and word.encode() in b" ".join(arguments):
                ranks[int(variables[b"RANK"])] = int(entry.name)
    return [ranks[rank] for rank in sorted(ranks)]


def wait_for_workers(run: Path, count: int) -> list[int]:
    """The process ids of the workers by rank, once training has begun."""
    wait_for_steps(run)
    workers = workers_of(run.name)
    assert len(workers) == count
    return workers


def parent_of(pid: int) -> int:
    return int((Path("/proc") / str(pid) / "stat").read_text().split()[3])


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().split()[2] != "Z"
    except OSError:
        return False
