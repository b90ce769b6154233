"""Supervision: whatever ends a launch is one message and one exit code, and nothing is left behind."""

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import termios
import time
from pathlib import Path

import pytest

from accel_parallel.checkpoints import complete_checkpoints
from accel_parallel.metrics import by_step, read_lines
from tests.commands import (
    BIN,
    alive,
    errors,
    faulty,
    launch,
    losses,
    make_home,
    parent_of,
    start,
    wait_for_steps,
    wait_for_workers,
    workers_of,
)

LONG = ["--set", "training.steps=5000"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, toy: list[str]) -> Path:
    return make_home(tmp_path_factory.mktemp("home"), toy)


# --- Workers that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "exit_code", "says"),
    [
        ("raise", 1, "KeyError: 'a key that nobody has' (on rank 1 at step 4) (traceback in runs/raise/traceback.txt)"),
        ("exit", 1, "rank 1 ended with exit code 7 at step 4 without saying why"),
        ("deaf", 1, "rank 1 ended with exit code 7 at step 4 without saying why"),
        ("kill", 1, "rank 1 was killed by SIGKILL at step 4"),
        ("memory", 2, "out of memory on rank 1 at step 4: tried to allocate "),
    ],
)
def test_a_failing_worker_ends_the_launch_with_one_line(kind: str, exit_code: int, says: str, home: Path) -> None:
    run, when = home / f"runs/{kind}", home / f"{kind}-time"
    fault = faulty(kind, "1", "4", when)
    result = launch(home, "fsdp", "--run", f"runs/{kind}", "--set", "checkpoint.every=2", *LONG, env=fault)
    assert time.time() - float(when.read_text()) < 15
    assert result.returncode == exit_code
    (error,) = errors(result.stderr)
    assert error.startswith(f"error: {says}")
    assert "Traceback" not in result.stderr
    assert workers_of(f"runs/{kind}") == []
    assert list(complete_checkpoints(run)) == [2]
    left = [path.name for path in run.rglob("*") if path.name.startswith(".partial") or path.suffix == ".tmp"]
    assert left == [], "half-written"
    if kind == "raise":
        assert "KeyError" in (run / "traceback.txt").read_text()


def test_out_of_memory_before_the_first_step(home: Path) -> None:
    """A real one: one matrix alone is larger than the address space that the worker may have."""
    big = "--set model.hidden_dim=1024 --set model.ffn_dim=2M"
    limited = f"ulimit -v {8 * 2**20}; exec accel-parallel launch single --run runs/big {big}"
    result = subprocess.run(
        ["bash", "-c", limited], cwd=home, capture_output=True, text=True, timeout=180, check=False,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    (error,) = errors(result.stderr)
    assert re.match(r"error: out of memory on rank 0 before the first step: tried to allocate \d+ bytes \(", error)
    assert "a smaller model or batch" in error


def test_a_killed_agent_leaves_no_worker_and_the_run_goes_on(home: Path) -> None:
    """The elastic launcher starts workers in sessions of their own: nothing but the kernel tells them of its death."""
    run = home / "runs/orphans"
    arguments = ["ddp", "--run", str(run), *LONG, "--set", "checkpoint.every=2"]
    with start(home, *arguments) as process:
        workers = wait_for_workers(run, 2)
        (run / "checkpoints/.partial-step-00000099").mkdir()
        before = (run / "spec.yaml").read_text()
        second = launch(home, "ddp", "--run", str(run), *LONG, "--set", "checkpoint.every=3")
        assert second.returncode == 2
        assert "another launch is running in" in second.stderr
        assert (run / "checkpoints/.partial-step-00000099").exists(), "a save of the first launch"
        assert (run / "spec.yaml").read_text() == before
        assert all(map(alive, workers)), "the first launch is not disturbed"
        (agent,) = {parent_of(pid) for pid in workers}
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
    again = launch(home, "ddp", "--run", str(run), *LONG, "--stop-at", str(done + 3))
    assert again.returncode == 0, again.stderr
    assert f"continues at step {done} of 5000" in again.stderr
    assert f"{done + 3} of 5000" in again.stdout
    assert {done + 1, done + 2, done + 3} <= set(by_step(read_lines(run / "metrics.jsonl"), "train"))
    assert not list((run / "checkpoints").glob(".partial*")), "left by the killed launch"


def test_an_agent_whose_launcher_is_gone_starts_nothing(tmp_path: Path) -> None:
    """It died before the kernel was asked to tell of it."""
    (tmp_path / "pid-launcher").write_text("1")
    arguments = [str(BIN / "python"), "-m", "accel_parallel.train.agent", str(tmp_path), "--nothing"]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (1, "")
    assert not (tmp_path / "agent.json").exists()


# --- Requests to stop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "to_all"),
    [(signal.SIGTERM, True), (signal.SIGUSR1, True), pytest.param(signal.SIGHUP, False, marks=pytest.mark.slow)],
)
def test_a_signal_stops_after_the_current_step(number: signal.Signals, to_all: bool, home: Path) -> None:
    """Nobody has to wait for the next report, which is never. A scheduler sends it to every process of the job."""
    run = home / f"runs/stopped-{number.name}"
    rarely = ["--set", "logging.every=4000", "--set", "training.warmup_steps=0"]
    with start(home, "ddp", "--run", str(run), *LONG, *rarely) as process:
        wait_for_steps(run, 1)
        time.sleep(1)
        workers = workers_of(run.name)
        for pid in (process.pid, *({parent_of(worker) for worker in workers} if to_all else ()), *workers):
            if to_all or pid == process.pid:
                os.kill(pid, number)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert "stopping after the current step, with a checkpoint" in stderr
    (step,) = complete_checkpoints(run)
    assert 1 < step < 4000
    assert list(by_step(read_lines(run / "metrics.jsonl"), "train")) == [1, step]
    assert f"{step} of 5000" in stdout
    assert len(workers) == 2
    assert not any(alive(pid) for pid in workers)


def test_a_signal_before_the_first_step_ends_at_once(home: Path) -> None:
    with start(home, "ddp", "--run", "runs/early", *LONG) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "starts runs/early: ddp, 2 processes\n"
        process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - begun < 15
    assert process.returncode == 130
    assert errors(stderr) == ["error: ended by SIGTERM before the first step; nothing was trained"]
    assert workers_of("runs/early") == []


def test_a_signal_is_passed_on_to_a_script(home: Path) -> None:
    (home / "waits.py").write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (os.write(1, b'saved\\n'), sys.exit(0)))\n"
        "os.write(1, b'waiting\\n')\n"
        "time.sleep(300)\n"
    )
    with start(home, "ddp", "--", "waits.py") as process:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGUSR1)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert stdout == "saved\nsaved\n"
    assert "SIGUSR1 passed on to the script" in stderr


class Terminal:
    """`accel-parallel launch` in a terminal of 80 columns, where Ctrl-C is typed and not sent."""

    def __init__(self, home: Path, *arguments: str, **variables: str) -> None:
        self.leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, b"\x18\x00\x50\x00" + bytes(4))
        self.process = start(
            home, *arguments, stdin=follower, stderr=follower, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "xterm", **variables},
        )  # fmt: skip
        os.close(follower)
        os.set_blocking(self.leader, False)
        self.shown = b""

    def read(self) -> None:
        try:
            self.shown += os.read(self.leader, 65536)
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:  # the other end is closed
            time.sleep(0.05)

    def wait_for_training(self) -> None:
        """The bar is not redrawn at every step."""
        deadline = time.monotonic() + 90
        while not re.search(rb"step [1-9]\d*/5000", self.shown):
            assert time.monotonic() < deadline, self.shown[-2000:]
            self.read()

    def type(self, keys: bytes) -> None:
        os.write(self.leader, keys)

    def end(self) -> int:
        deadline = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read()
        self.read()
        os.close(self.leader)
        return self.process.wait(timeout=1)

    @property
    def lines(self) -> list[str]:
        # ^C is the terminal's echo.
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\^C", "", self.shown.decode())
        return re.split(r"[\r\n]+", text)


def test_ctrl_c_in_a_terminal_stops_in_order_under_one_progress_bar(home: Path) -> None:
    terminal = Terminal(home, "ddp", "--run", "runs/terminal", *LONG, NO_COLOR="1")
    terminal.wait_for_training()
    terminal.type(b"\x03")
    assert terminal.end() == 130
    assert "stopping after the current step, with a checkpoint; Ctrl-C again ends at once" in terminal.lines
    (step,) = complete_checkpoints(home / "runs/terminal")
    assert step == len(losses(home / "runs/terminal")) < 5000
    drawn = [line for line in terminal.lines if line.startswith("step ")]
    assert any(re.match(rf"step {step}/5000 .*loss \d", line) for line in drawn), drawn[-3:]
    assert max(len(line) for line in drawn) <= 80, [line for line in drawn if len(line) > 80][:3]
    assert not re.search(rb"\x1b\[[0-9;]*3[0-7]", terminal.shown), "colours under NO_COLOR"
    assert "Traceback" not in terminal.shown.decode()


def test_ctrl_c_twice_in_a_terminal_ends_at_once(home: Path) -> None:
    terminal = Terminal(home, "fsdp", "--run", "runs/twice", *LONG)
    terminal.wait_for_training()
    workers = workers_of("runs/twice")
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)  # so that they cannot stop in order
    terminal.type(b"\x03")
    time.sleep(0.5)
    terminal.type(b"\x03")
    begun = time.monotonic()
    assert terminal.end() == 130
    assert time.monotonic() - begun < 15
    assert "error: ended at once by SIGINT; earlier checkpoints are as they were" in terminal.lines
    assert "Traceback" not in terminal.shown.decode()
    for worker in filter(alive, workers):
        os.kill(worker, signal.SIGCONT)
    time.sleep(0.5)
    assert len(workers) == 2
    assert not any(map(alive, workers))


# --- Where output and files cannot go ---------------------------------------------------------------------------------


def test_a_closed_standard_output_is_one_line_after_training(home: Path) -> None:
    """Training is not lost over it: the checkpoint and the summary are in the run directory."""
    script = "exec accel-parallel launch single --run runs/closed --stop-at 2 >&-"
    result = subprocess.run(
        ["bash", "-c", script], cwd=home, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert "Traceback" not in result.stderr
    assert list(complete_checkpoints(home / "runs/closed")) == [2]
    assert json.loads((home / "runs/closed/summary.json").read_text())["step"] == 2


def test_a_standard_error_that_is_full_does_not_stop_training(home: Path) -> None:
    script = "exec accel-parallel launch single --run runs/mute --stop-at 2 2>/dev/full"
    result = subprocess.run(
        ["bash", "-c", script], cwd=home, stdout=subprocess.PIPE, text=True, timeout=120, check=False,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert result.returncode == 0
    assert "2 of 20" in result.stdout
    assert list(complete_checkpoints(home / "runs/mute")) == [2]


def test_a_read_only_run_directory_is_one_line(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)], capture_output=True).returncode:
        assert "CI" not in os.environ, "CI runs as root and can mount a read-only file system"
        pytest.skip("mounting needs root")
    try:
        result = launch(home, "ddp", "--run", str(folder / "run"))
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        f"error: cannot write to {folder / 'run'}: Read-only file system (name another directory with --run)"
    ]
