"""Restarts: a worker that dies brings the job back by itself, and what would only happen again ends it."""

import json
import os
import signal
import statistics
import subprocess
import time
from pathlib import Path

import pytest

from accel_parallel.checkpoints import complete_checkpoints
from accel_parallel.metrics import read_lines
from tests.commands import (
    errors,
    faulty,
    free_port,
    launch,
    losses,
    make_home,
    set_options,
    start,
    wait_for_steps,
    workers_of,
)

LONG = ["--set", "training.steps=5000"]


def restarts(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("restart ")]


# --- Workers that die -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, toy: list[str]) -> Path:
    return make_home(tmp_path_factory.mktemp("home"), toy)


@pytest.fixture(scope="module")
def uninterrupted(home: Path) -> list[float]:
    """The losses of `ddp`."""
    result = launch(home, "ddp", "--run", "runs/uninterrupted")
    assert result.returncode == 0, result.stderr
    return losses(home / "runs/uninterrupted")


def temporary(folder: Path) -> dict[str, str]:
    """The environment of a launch whose temporary files can be looked at."""
    folder.mkdir()
    return {"TMPDIR": str(folder)}


def test_a_killed_worker_brings_the_job_back_bit_for_bit(
    home: Path, tmp_path: Path, uninterrupted: list[float]
) -> None:
    fault = faulty("kill", "1", "14", tmp_path / "times", FAULT_COUNT="1", **temporary(tmp_path / "tmp"))
    arguments = ["--run", "runs/killed", "--set", "checkpoint.every=5", "--max-restarts", "3", "--json"]
    result = launch(home, "ddp", *arguments, env=fault)
    assert result.returncode == 0, result.stderr
    line = "restart 1 of 3: rank 1 was killed by SIGKILL at step 14; goes on from step-00000010"
    assert restarts(result.stderr) == [line]
    assert "continues at step 10 of 20" in result.stderr
    assert losses(home / "runs/killed") == uninterrupted
    assert json.loads(result.stdout)["data"]["restarts"] == 1
    (event,) = [row for row in read_lines(home / "runs/killed/metrics.jsonl") if row["kind"] == "event"]
    assert (event["step"], event["message"]) == (10, line)
    assert not list((tmp_path / "tmp").glob("accel-parallel-*"))
    assert workers_of("runs/killed") == []


def test_after_the_last_restart_the_last_failure_is_told(home: Path, tmp_path: Path) -> None:
    fault = faulty("raise", "1,0", "+3", tmp_path / "times")
    arguments = ["--run", "runs/exhausted", "--set", "checkpoint.every=2", "--max-restarts", "1"]
    result = launch(home, "ddp", *arguments, env=fault)
    assert result.returncode == 1
    kept = "(traceback in runs/exhausted/traceback.txt)"
    what = "KeyError: 'a key that nobody has'"
    assert restarts(result.stderr) == [
        f"restart 1 of 1: {what} (on rank 1 at step 3) {kept}; goes on from step-00000002"
    ]
    assert errors(result.stderr) == [f"error: {what} (on rank 0 at step 5), after 1 restart {kept}"]
    assert (home / "runs/exhausted/traceback.txt").read_text().count("KeyError: 'a key that nobody has'\n") == 2
    assert list(complete_checkpoints(home / "runs/exhausted")) == [2, 4]
    assert workers_of("runs/exhausted") == []


def test_what_would_happen_again_is_not_tried_again(home: Path, tmp_path: Path) -> None:
    fault = faulty("memory", "1", "2", tmp_path / "times")
    memory = launch(home, "ddp", "--run", "runs/memory", "--max-restarts", "3", env=fault)
    data = launch(home, "ddp", "--run", "runs/data", "--max-restarts", "3", "--set", "data.recipe=nowhere/at/all")
    for result, words in ((memory, "out of memory on rank 1 at step 2"), (data, "nowhere/at/all")):
        assert result.returncode == 2
        (error,) = errors(result.stderr)
        assert words in error
        assert restarts(result.stderr) == []


def test_a_generation_that_runs_something_else_trains_nothing(home: Path, tmp_path: Path) -> None:
    """What was asked for is compared with what runs in each of them."""
    wrong = {"FAULT_COUNT": "1", "FAULT_SABOTAGE": "no promotion to FSDP"}
    fault = faulty("kill", "1", "4", tmp_path / "times", **wrong)
    arguments = ["--run", "runs/changed", "--set", "checkpoint.every=2", "--max-restarts", "3"]
    result = launch(home, "fsdp", *arguments, env=fault)
    assert result.returncode == 1
    assert len(restarts(result.stderr)) == 1
    (error,) = errors(result.stderr)
    assert "asked for fsdp version 2, got ddp" in error
    assert ", after 1 restart" in error
    assert len(losses(home / "runs/changed")) == 3


def test_a_worker_that_dies_after_the_last_checkpoint_ends_well(home: Path, tmp_path: Path) -> None:
    fault = faulty("end", "0", "0", tmp_path / "times")
    result = launch(home, "ddp", "--run", "runs/end", "--max-restarts", "1", env=fault)
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[-1].endswith("was killed by SIGKILL at step 20; nothing is left to do")
    assert result.stdout == "runs/end is complete (20 steps); --fresh starts a new run\n"


SCRIPT = """\
import os, signal, sys
from pathlib import Path
from accelerate import Accelerator

accelerator = Accelerator()
accelerator.wait_for_everyone()
begun = Path(sys.argv[1])
first = not begun.exists()
accelerator.wait_for_everyone()
if first and accelerator.is_main_process:
    begun.write_text("")
    os.kill(os.getpid(), signal.SIGKILL)
accelerator.wait_for_everyone()
accelerator.print("RESULT", accelerator.num_processes)
"""


def test_a_script_is_started_again(home: Path, tmp_path: Path) -> None:
    (home / "dies.py").write_text(SCRIPT)
    result = launch(home, "ddp", "--max-restarts", "2", "--", "dies.py", str(tmp_path / "begun"))
    assert result.returncode == 0, result.stderr
    assert restarts(result.stderr) == ["restart 1 of 2: rank 0 was killed by SIGKILL; starts the script again"]
    assert result.stdout.splitlines() == ["RESULT 2"]


# --- Requests to stop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_request_in_the_second_generation(number: signal.Signals, exit_code: int, home: Path, tmp_path: Path) -> None:
    run = home / f"runs/again-{number.name}"
    fault = faulty("kill", "0", "4", tmp_path / "times", FAULT_COUNT="1", **temporary(tmp_path / "tmp"))
    arguments = ["ddp", "--run", str(run), "--set", "checkpoint.every=2", *LONG, "--max-restarts", "1"]
    with start(home, *arguments, env={**os.environ, **fault}) as process:
        wait_for_steps(run, 5)
        workers = workers_of(run.name)
        assert len(list((tmp_path / "tmp").glob("accel-parallel-*"))) == 1, "that of the first generation is gone"
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == exit_code, stderr
    assert len(restarts(stderr)) == 1
    assert "stopping after the current step, with a checkpoint" in stderr
    assert max(complete_checkpoints(run)) == len(losses(run))
    assert len(workers) == 2
    assert workers_of(run.name) == []
    assert not list((tmp_path / "tmp").glob("accel-parallel-*"))


def test_an_interrupt_at_the_restart_ends_at_once(home: Path, tmp_path: Path) -> None:
    fault = faulty("kill", "1", "4", tmp_path / "times")
    arguments = ["ddp", "--run", "runs/at-once", "--set", "checkpoint.every=2", *LONG, "--max-restarts", "3"]
    with start(home, *arguments, env={**os.environ, **fault}) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("restart 1 of 3: "):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors(stderr) == ["error: ended at once by SIGINT; earlier checkpoints are as they were"]
    assert workers_of("runs/at-once") == []
    assert list(complete_checkpoints(home / "runs/at-once")) == [2]


# --- Several machines -------------------------------------------------------------------------------------------------


def start_machines(home: Path, run: str, env: dict[str, str]) -> list[subprocess.Popen[str]]:
    """Two launchers on this host, a process each."""
    arguments = ["ddp", "--run", f"runs/{run}", "--num-processes", "1", "--max-restarts", "3"]
    sets = ["distributed.num_machines=2", "distributed.main_process_ip=127.0.0.1", "checkpoint.every=5"]
    arguments += set_options([*sets, f"distributed.main_process_port={free_port()}"])
    return [start(home, *arguments, "--machine-rank", str(rank), env={**os.environ, **env}) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_each_of_two_machines_comes_back_by_itself(
    rank: int, home: Path, tmp_path: Path, uninterrupted: list[float]
) -> None:
    run = f"machines-{rank}"
    machines = start_machines(home, run, faulty("kill", str(rank), "14", tmp_path / "times", FAULT_COUNT="1"))
    ends = [machine.communicate(timeout=180) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], ends
    lines = [restarts(stderr) for _, stderr in ends]
    assert [len(each) for each in lines] == [1, 1]
    assert lines[rank] == [f"restart 1 of 3: rank {rank} was killed by SIGKILL at step 14; goes on from step-00000010"]
    assert losses(home / f"runs/{run}") == uninterrupted


def test_a_machine_waits_for_the_first_that_has_not_seen_its_loss(
    home: Path, tmp_path: Path, uninterrupted: list[float]
) -> None:
    """As NCCL does for minutes: meanwhile the first machine's store is that of the lost generation."""
    machines = start_machines(home, "late", faulty("frozen", "1", "14", tmp_path / "times", FAULT_COUNT="1"))
    second = machines[1].stderr
    assert second is not None
    try:
        line = ""
        while not line.startswith("restart 1 of 3: rank 1 was killed by SIGKILL at step 14"):
            line = second.readline()
            assert line, "it ended"
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            (frozen,) = workers_of("runs/late")
            time.sleep(0.5)
        os.kill(frozen, signal.SIGCONT)
        ends = [machine.communicate(timeout=180) for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [0, 0], ends
    assert restarts(ends[1][1]) == [], "one was enough"
    assert len(restarts(ends[0][1])) == 1
    assert losses(home / "runs/late") == uninterrupted


# --- Many times -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [pytest.param(7, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.long)])
def test_many_in_a_row(home: Path, tmp_path: Path, times: int) -> None:
    """A worker of each generation is killed in its second step, the main one in every other."""
    fault = faulty("kill", "1,0", "+2", tmp_path / "times", FAULT_COUNT=str(times))
    arguments = [
        "ddp",
        "--run",
        f"runs/row-{times}",
        "--set",
        "checkpoint.every=1",
        "--set",
        f"training.steps={times + 4}",
    ]
    with start(home, *arguments, "--max-restarts", str(times), env={**os.environ, **fault}) as process:
        _, stderr = process.communicate(timeout=1800)
    assert process.returncode == 0, stderr
    assert [line.split(":")[0] for line in restarts(stderr)] == [f"restart {n} of {times}" for n in range(1, times + 1)]
    straight = launch(home, "ddp", "--run", f"runs/straight-{times}", "--set", f"training.steps={times + 4}")
    assert straight.returncode == 0
    assert losses(home / f"runs/row-{times}") == losses(home / f"runs/straight-{times}")
    failed = [float(line) for line in (tmp_path / "times").read_text().splitlines()]
    assert len(failed) == times
    trained = sorted(
        row["time"] for row in read_lines(home / f"runs/row-{times}/metrics.jsonl") if row["kind"] == "train"
    )
    seconds = [min(at for at in trained if at > when) - when for when in failed]
    print(f"from the kill to the next step: median {statistics.median(seconds):.1f} s, max {max(seconds):.1f} s")
