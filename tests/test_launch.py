"""The commands a user types, for real: `accel-parallel launch` and plain `accelerate launch`."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from accel_parallel.metrics import by_step, read_lines
from accel_parallel.runs import complete_checkpoints

BIN = Path(sys.executable).parent
TIMEOUT = 180


def command(arguments: Sequence[str], cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT, check=False,
        env={**os.environ, "COLUMNS": "80"}, **options,
    )  # fmt: skip


def launch(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return command([str(BIN / "accel-parallel"), "launch", *arguments], cwd)


def set_options(sets: Sequence[str]) -> list[str]:
    return [part for entry in sets for part in ("--set", entry)]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in by_step(read_lines(run / "metrics.jsonl"), "train").values()]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, toy: list[str]) -> Path:
    """A folder as a user has it: the specification of a toy run and the files generated from it."""
    folder = tmp_path_factory.mktemp("home")
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


@pytest.fixture(scope="module")
def launched(home: Path) -> subprocess.CompletedProcess[str]:
    return launch(home, "fsdp")


def test_launch_trains_and_sums_up(home: Path, launched: subprocess.CompletedProcess[str]) -> None:
    assert launched.returncode == 0, launched.stderr
    run = home / "runs/fsdp-001"
    assert sorted(path.name for path in run.iterdir() if not path.name.startswith(".")) == [
        "accelerate.yaml", "checkpoints", "environment.json", "metrics.jsonl", "spec.yaml", "summary.json",
    ]  # fmt: skip
    assert list(complete_checkpoints(run)) == [20]
    lines = launched.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    names = [line[:15].strip() for line in lines if line[:1].strip()]
    assert names == [
        "run", "steps", "train loss", "validation loss", "unigram entropy", "speed", "peak memory", "checkpoint",
        "sample (the pro",
    ]  # fmt: skip
    assert "fsdp on 2 x cpu" in launched.stdout
    assert "on CPU: mixed_precision: bf16 -> no" in launched.stderr
    assert "step 20/20  loss" in launched.stderr
    assert "Traceback" not in launched.stderr
    assert "Warning" not in launched.stderr


def test_again_it_says_that_the_run_is_complete(home: Path, launched: subprocess.CompletedProcess[str]) -> None:
    before = (home / "runs/fsdp-001/metrics.jsonl").read_text()
    again = launch(home, "fsdp")
    assert again.returncode == 0
    assert again.stdout == "runs/fsdp-001 is complete (20 steps); --fresh starts a new run\n"
    assert (home / "runs/fsdp-001/metrics.jsonl").read_text() == before


def test_plain_accelerate_launch_is_the_same_run(home: Path, launched: subprocess.CompletedProcess[str]) -> None:
    """No launcher of ours: the committed file, the same loop, the same losses to the last bit."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    arguments = ["launch", "--config_file", "accelerate_configs/fsdp.yaml", "--main_process_port", str(port)]
    arguments += ["-m", "accel_parallel.train", "--fresh", "--set", "training.steps=20"]
    result = command([str(BIN / "accelerate"), *arguments], home)
    assert result.returncode == 0, result.stderr
    assert "fsdp on 2 x cpu, runs/fsdp-002" in result.stdout
    assert losses(home / "runs/fsdp-002") == losses(home / "runs/fsdp-001")


def test_launch_stopped_resumed_and_json(home: Path) -> None:
    """`ddp` here, so that each strategy is launched for real once."""
    half = launch(home, "ddp", "--stop-at", "6", "--json")
    assert half.returncode == 0, half.stderr
    content = json.loads(half.stdout)
    assert content["schema"] == 1
    assert content["command"] == "launch"
    assert content["ok"] is True
    assert content["data"]["summary"]["step"] == 6
    whole = launch(home, "ddp")
    assert "continues runs/ddp-001" in whole.stderr
    assert "continues at step 6 of 20" in whole.stderr
    assert len(losses(home / "runs/ddp-001")) == 20


def test_single_with_an_override_takes_a_new_run(home: Path) -> None:
    result = launch(home, "single", "--set", "training.steps=4", "--set", "logging.trackers=[tensorboard]")
    assert result.returncode == 0, result.stderr
    assert "single on 1 x cpu" in result.stdout
    assert len(losses(home / "runs/single-001")) == 4
    other = launch(home, "single", "--set", "training.steps=5")
    assert "runs/single-001 holds another specification (training.steps 4 -> 5): starting a new run" in other.stderr
    assert len(losses(home / "runs/single-002")) == 5

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = {path.parent for path in (home / "runs/single-001/trackers").glob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    logged = [event.value for event in events.Scalars("train/loss")]
    assert logged == pytest.approx(losses(home / "runs/single-001"), rel=1e-6)
    assert events.Scalars("eval/loss")


def test_a_port_in_use_is_replaced_and_said(home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = launch(
            home, "ddp", "--run", "runs/port", "--stop-at", "1", "--set", f"distributed.main_process_port={port}"
        )
    assert result.returncode == 0, result.stderr
    assert re.search(rf"port {port} is in use: port \d+ is used instead", result.stderr)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "data.recipe=nowhere/at/all"], "nowhere/at/all"),
        (["--set", "data.max_tokens=100"], "tokens"),
    ],
)
def test_an_error_of_the_workers_is_one_line(arguments: list[str], words: str, home: Path) -> None:
    result = launch(home, "ddp", "--fresh", *arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert words in errors[0]
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1] == errors[0]


def test_a_killed_worker_ends_the_launch(home: Path) -> None:
    with subprocess.Popen(
        [str(BIN / "accel-parallel"), "launch", "fsdp", "--run", "runs/killed", "--set", "training.steps=5000"],
        cwd=home, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        workers = wait_for_workers(process.pid, home / "runs/killed", 2)
        os.kill(workers[1], signal.SIGKILL)
        begun = time.monotonic()
        _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - begun < 15
    assert process.returncode == 1
    assert "rank 1 was killed by SIGKILL" in stderr
    assert "Traceback" not in stderr
    assert not any(alive(pid) for pid in workers)


def test_a_killed_agent_leaves_no_worker_and_the_run_goes_on(home: Path) -> None:
    """The elastic launcher starts workers in sessions of their own: nothing but the kernel tells them of its death."""
    run = home / "runs/orphans"
    arguments = ["launch", "ddp", "--run", str(run), "--set", "training.steps=5000", "--set", "checkpoint.every=2"]
    with subprocess.Popen(
        [str(BIN / "accel-parallel"), *arguments], cwd=home, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        workers = wait_for_workers(process.pid, run, 2)
        second = launch(home, "ddp", "--run", str(run), "--set", "training.steps=5000")
        assert second.returncode == 2
        assert "another launch is running in" in second.stderr
        assert all(map(alive, workers)), "the first launch is not disturbed"
        (agent,) = {int((Path("/proc") / str(pid) / "stat").read_text().split()[3]) for pid in workers}
        os.kill(agent, signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: " in stderr
    assert "Traceback" not in stderr
    deadline = time.monotonic() + 5
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, workers))
    done = max(complete_checkpoints(run))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    again = launch(home, "ddp", "--run", str(run), "--set", "training.steps=5000", "--stop-at", str(done + 3))
    assert again.returncode == 0, again.stderr
    assert f"continues at step {done} of 5000" in again.stderr
    assert f"{done + 3} of 5000" in again.stdout
    assert {done + 1, done + 2, done + 3} <= set(by_step(read_lines(run / "metrics.jsonl"), "train"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_in_order(number: signal.Signals, home: Path) -> None:
    run = home / f"runs/stopped-{number.name}"
    with subprocess.Popen(
        [str(BIN / "accel-parallel"), "launch", "ddp", "--run", str(run), "--set", "training.steps=5000"],
        cwd=home, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        workers = wait_for_workers(process.pid, run, 2)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else 0), stderr
    assert "stopping after the current step, with a checkpoint" in stderr
    (step,) = complete_checkpoints(run)
    assert step == len(losses(run)) < 5000
    assert f"{step} of 5000" in stdout
    assert not any(alive(pid) for pid in workers)


def test_a_second_interrupt_ends_at_once(home: Path) -> None:
    run = home / "runs/twice"
    with subprocess.Popen(
        [str(BIN / "accel-parallel"), "launch", "fsdp", "--run", str(run), "--set", "training.steps=5000"],
        cwd=home, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        workers = wait_for_workers(process.pid, run, 2)
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)  # so that they cannot stop in order
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - begun < 15
    assert process.returncode == 130
    assert "ended at once; earlier checkpoints are as they were" in stderr
    assert "Traceback" not in stderr
    for worker in workers:
        if alive(worker):
            os.kill(worker, signal.SIGCONT)
    time.sleep(0.5)
    assert not any(map(alive, workers))


def test_two_machines_that_are_one(home: Path) -> None:
    """Two launchers on this host, a process each: the losses of one machine with two."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    arguments = ["launch", "ddp", "--run", "runs/machines", "--stop-at", "6", "--num-processes", "1"]
    sets = ["distributed.num_machines=2", "distributed.main_process_ip=127.0.0.1"]
    arguments += set_options([*sets, f"distributed.main_process_port={port}"])
    machines = [
        subprocess.Popen(
            [str(BIN / "accel-parallel"), *arguments, "--machine-rank", str(rank)],
            cwd=home, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    ends = [machine.communicate(timeout=120) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], ends
    assert "ddp on 2 x cpu" in ends[0][0]
    assert ends[1][0] == ""
    one = launch(home, "ddp", "--run", "runs/one", "--stop-at", "6")
    assert one.returncode == 0
    assert losses(home / "runs/machines") == losses(home / "runs/one")


def test_one_progress_bar_in_a_terminal(home: Path) -> None:
    """In a pseudo-terminal of 80 columns: a bar that is redrawn, and nothing wider than the screen."""
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [str(BIN / "accel-parallel"), "launch", "ddp", "--run", "runs/terminal", "--stop-at", "12"],
        cwd=home, stderr=follower, stdout=subprocess.PIPE, stdin=follower,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
    ) as process:  # fmt: skip
        os.close(follower)
        shown = b""
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:
                break
            if not part:
                break
            shown += part
        assert process.wait(timeout=60) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    drawn = [line for line in re.split(r"[\r\n]+", text) if line.startswith("step ")]
    assert any(re.match(r"step 12/20 .*loss \d", line) for line in drawn), drawn[-3:]
    assert max(len(line) for line in drawn) <= 80
    os.close(leader)


def wait_for_workers(launcher: int, run: Path, count: int) -> list[int]:
    """The process ids of the workers by rank, once training has begun."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if (run / "metrics.jsonl").exists() and len(losses(run)) >= 3:
            break
        time.sleep(0.2)
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
            is_worker = b"accel_parallel.train" in arguments and b"accel_parallel.train.agent" not in arguments
            if is_worker and bytes(run.name, "utf-8") in b" ".join(arguments):
                ranks[int(variables[b"RANK"])] = int(entry.name)
    assert sorted(ranks) == list(range(count)), "training did not begin"
    return [ranks[rank] for rank in range(count)]


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().split()[2] != "Z"
    except OSError:
        return False
