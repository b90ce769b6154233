"""Which of many ends is told: what workers and launcher left in the status directory becomes one message and code."""

import itertools
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from accel_parallel.ended import Ended, Requests, read_end
from accel_parallel.errors import Problem
from accel_parallel.launch import LOOP, LaunchPlan
from accel_parallel.restarts import Restart, run_generations
from accel_parallel.supervise import Signals, _end_group, _killed_for_memory

KILL, TERM = -signal.SIGKILL, -signal.SIGTERM


@dataclass
class Launch:
    """A status directory as a launch leaves it."""

    status: Path
    failures: list[dict[str, int]] = field(default_factory=list)
    """In the order in which the launcher saw them."""

    def failed(self, rank: int, exit_code: int) -> None:
        self.failures.append({"rank": rank, "exit_code": exit_code})

    def step(self, rank: int, step: int) -> None:
        (self.status / f"step-{rank}").write_text(f"{step:20d}")

    def told(
        self, rank: int, message: str, time: float, *, exit_code: int = 2, trace: str | None = None, code: str = "data"
    ) -> None:
        problem = Problem(message, code=code, hint="a hint")
        error = {
            "rank": rank,
            "exit_code": exit_code,
            "problems": [problem.to_dict()],
            "traceback": trace,
            "time": time,
        }
        (self.status / f"error-{rank}.json").write_text(json.dumps(error))
        self.failed(rank, exit_code)

    def known(self, rank: int, time: float = 1.0) -> None:
        self.told(rank, f"cause on {rank}", time)

    def crash(self, rank: int, time: float = 1.0) -> None:
        self.told(rank, f"crash on {rank}", time, exit_code=1, trace=f"trace of {rank}", code="crash")

    def lost(self, rank: int, time: float = 1.0) -> None:
        self.told(rank, f"lost on {rank}", time, exit_code=1, trace=f"trace of {rank}", code="peer-lost")

    def end(self, returncode: int = 1, *, killed_for_memory: int = 0, **signals: Any) -> Ended:
        if self.failures:
            self.agent({"ok": False, "failures": self.failures})
        return read_end(self.status, returncode, Requests(**signals), killed_for_memory)

    def agent(self, report: dict[str, Any]) -> None:
        (self.status / "agent.json").write_text(json.dumps(report))


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(tmp_path)


def line(ended: Ended) -> str:
    (problem,) = ended.problems
    return problem.message


# --- Who is told -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(("known", "crash", "lost", "mute"))), ids="-".join)
def test_causes_before_mute_ranks_before_crashes_before_consequences(order: tuple[str, ...], launch: Launch) -> None:
    """Whoever was earlier, and whatever rank it had."""
    for rank, kind in enumerate(order):
        if kind == "mute":
            launch.failed(rank, 7)
        else:
            getattr(launch, kind)(rank, time=float(rank))
    ended = launch.end()
    assert line(ended) == f"cause on {order.index('known')}"
    assert (ended.exit_code, ended.traceback) == (2, None)
    (launch.status / f"error-{order.index('known')}.json").unlink()
    launch.failures = [failure for failure in launch.failures if failure["rank"] != order.index("known")]
    assert line(launch.end()) == f"rank {order.index('mute')} ended with exit code 7 without saying why"
    launch.failures = [failure for failure in launch.failures if failure["rank"] != order.index("mute")]
    assert line(launch.end()) == f"crash on {order.index('crash')}"
    (launch.status / f"error-{order.index('crash')}.json").unlink()
    launch.failures = [failure for failure in launch.failures if failure["rank"] == order.index("lost")]
    assert line(launch.end()) == f"lost on {order.index('lost')}"


@pytest.mark.parametrize("kind", ["known", "crash", "lost"])
@pytest.mark.parametrize("first", [0, 1, 10])
def test_of_equal_ones_the_earliest(kind: str, first: int, launch: Launch) -> None:
    for rank in (0, 1, 10):
        getattr(launch, kind)(rank, time=1.0 if rank == first else 2.0 + rank)
    ended = launch.end()
    assert line(ended).endswith(f" on {first}")
    assert ended.traceback == (None if kind == "known" else f"trace of {first}")


def test_of_mute_ranks_the_one_that_the_launcher_saw_first(launch: Launch) -> None:
    launch.failed(3, 7)
    launch.failed(0, 9)
    assert line(launch.end()).startswith("rank 3 ended with exit code 7")


def test_a_killed_rank_before_the_one_that_lost_it(launch: Launch) -> None:
    launch.lost(0, time=1.0)
    launch.failed(1, KILL)
    launch.step(1, 12)
    ended = launch.end()
    assert line(ended) == "rank 1 was killed by SIGKILL at step 12"
    assert (ended.exit_code, ended.traceback, ended.problems[0].code) == (1, None, "worker")


def test_ranks_that_the_launcher_ended_are_never_blamed(launch: Launch) -> None:
    launch.failed(0, TERM)
    launch.lost(1)
    launch.failed(2, TERM)
    assert line(launch.end()) == "lost on 1"


def test_only_ended_ranks_are_no_cause_at_all(launch: Launch) -> None:
    launch.failed(0, TERM)
    launch.failed(1, TERM)
    assert line(launch.end()) == "the launcher ended without a result: exit code 1"


def test_a_rank_that_the_launcher_had_to_kill_is_not_blamed_for_a_crash(launch: Launch) -> None:
    """It did not obey SIGTERM, for example because it waited for the crashed one in a collective."""
    launch.crash(1)
    launch.failed(0, KILL)
    ended = launch.end()
    assert (line(ended), ended.traceback) == ("crash on 1", "trace of 1")


def test_a_rank_that_was_killed_before_the_crash_is(launch: Launch) -> None:
    launch.failed(0, KILL)
    launch.crash(1)
    assert line(launch.end()) == "rank 0 was killed by SIGKILL"


def test_a_rank_that_the_kernel_ended_is_blamed_whoever_was_seen_first(launch: Launch) -> None:
    launch.crash(0)
    launch.failed(1, KILL)
    launch.step(1, 5)
    message = "rank 1 was killed by SIGKILL at step 5 (the kernel ended it: out of memory)"
    assert line(launch.end(killed_for_memory=1)) == message


def test_what_was_told_is_told_whole(launch: Launch) -> None:
    launch.known(0)
    (problem,) = launch.end().problems
    assert problem == Problem("cause on 0", code="data", hint="a hint")


# --- Exit codes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exit_code", [1, 2])
def test_the_code_is_the_one_of_the_rank_that_is_told(exit_code: int, launch: Launch) -> None:
    launch.told(0, "x", 1.0, exit_code=exit_code)
    launch.crash(1, time=0.5)
    assert launch.end().exit_code == exit_code


@pytest.mark.parametrize(
    ("exit_code", "step", "message"),
    [
        (3, 0, "rank 1 ended with exit code 3 without saying why"),
        (3, 4, "rank 1 ended with exit code 3 at step 4 without saying why"),
        (-signal.SIGSEGV, 4, "rank 1 was killed by SIGSEGV at step 4"),
        (-signal.SIGSEGV, 0, "rank 1 was killed by SIGSEGV"),
        (KILL, 0, "rank 1 was killed by SIGKILL"),
    ],
)
def test_an_end_without_a_word(exit_code: int, step: int, message: str, launch: Launch) -> None:
    launch.failed(1, exit_code)
    launch.step(1, step)
    ended = launch.end()
    assert (ended.exit_code, line(ended)) == (1, message)


def test_memory_is_only_a_reason_for_who_was_killed(launch: Launch) -> None:
    launch.failed(0, -signal.SIGSEGV)
    assert line(launch.end(killed_for_memory=1)) == "rank 0 was killed by SIGSEGV"


def test_success(launch: Launch) -> None:
    (launch.status / "summary.json").write_text('{"step": 7}')
    launch.agent({"ok": True})
    assert launch.end(0) == Ended(0, {"step": 7}, [])


def test_success_of_a_machine_that_has_no_summary(launch: Launch) -> None:
    launch.agent({"ok": True})
    assert launch.end(0) == Ended(0, None, [])


def test_a_launcher_that_says_nothing_did_not_succeed(launch: Launch) -> None:
    ended = launch.end(0)
    assert (ended.exit_code, line(ended)) == (1, "the launcher ended without a result: exit code 0")
    assert line(launch.end(KILL)) == "the launcher ended without a result: was killed by SIGKILL"


def test_what_accelerate_refuses_before_anything_is_started(launch: Launch) -> None:
    launch.agent({"ok": False, "failures": [], "message": "ValueError: unknown keys"})
    ended = launch.end()
    assert (ended.exit_code, line(ended), ended.problems[0].code) == (2, "ValueError: unknown keys", "launcher")


# --- What need not happen again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["crash", "lost"])
def test_what_has_no_known_cause_is_restartable(kind: str, launch: Launch) -> None:
    getattr(launch, kind)(1)
    assert launch.end().restartable


@pytest.mark.parametrize("code", [7, KILL, -signal.SIGSEGV])
def test_who_ends_without_a_word_is_restartable(code: int, launch: Launch) -> None:
    launch.lost(0)
    launch.failed(1, code)
    assert launch.end().restartable


@pytest.mark.parametrize("other", ["crash", "lost", "mute"])
def test_a_known_cause_is_not_whatever_else_happened(other: str, launch: Launch) -> None:
    if other == "mute":
        launch.failed(0, KILL)
    else:
        getattr(launch, other)(0, time=0.5)
    launch.known(1)
    assert not launch.end().restartable


def test_who_was_killed_for_memory_would_be_again(launch: Launch) -> None:
    """Even if another one was seen to end before."""
    launch.failed(0, 7)
    launch.failed(1, KILL)
    assert not launch.end(killed_for_memory=1).restartable
    launch.failures.pop()
    assert launch.end(killed_for_memory=1).restartable, "some other process of this computer was killed"


@pytest.mark.parametrize(("code", "restartable"), [(KILL, True), (1, False)])
def test_a_launcher_that_was_killed_is_restartable(code: int, restartable: bool, launch: Launch) -> None:
    assert launch.end(code).restartable is restartable
    assert not launch.end(code, killed_for_memory=1).restartable


def test_success_requests_and_refusals_are_not(launch: Launch) -> None:
    launch.failed(0, KILL)
    assert not launch.end(at_once=True, trained=True).restartable
    launch.failures = []
    launch.agent({"ok": False, "failures": [], "message": "ValueError: unknown keys"})
    assert not launch.end().restartable
    launch.agent({"ok": True})
    assert not launch.end(0).restartable


# --- Requests to stop ------------------------------------------------------------------------------------------------


def test_interrupted_and_finished_in_order(launch: Launch) -> None:
    (launch.status / "summary.json").write_text('{"step": 7}')
    launch.agent({"ok": True})
    assert launch.end(0, interrupted=True, received=signal.SIGINT) == Ended(130, {"step": 7}, [])
    assert launch.end(0, received=signal.SIGTERM).exit_code == 0


def test_ended_at_once_whatever_there_is(launch: Launch) -> None:
    (launch.status / "summary.json").write_text('{"step": 7}')
    launch.known(0)
    ended = launch.end(at_once=True, trained=True)
    assert (ended.exit_code, ended.summary) == (130, None)
    assert line(ended) == "ended at once; earlier checkpoints are as they were"
    assert line(launch.end(at_once=True)) == "ended before the first step; nothing was trained"
    early = launch.end(at_once=True, received=signal.SIGTERM)
    assert line(early) == "ended by SIGTERM before the first step; nothing was trained"


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGINT, -2), (signal.SIGTERM, TERM), (signal.SIGUSR1, -10), (signal.SIGTERM, 143)],
)
def test_a_script_that_a_passed_on_signal_ended(number: signal.Signals, code: int, launch: Launch) -> None:
    launch.failed(0, code)
    launch.failed(1, TERM)
    ended = launch.end(received=number)
    assert (ended.exit_code, line(ended)) == (130, f"ended by {number.name}")
    assert ended.problems[0].code == "interrupted"


def test_what_else_happens_after_a_signal_is_told(launch: Launch) -> None:
    launch.failed(0, -signal.SIGSEGV)
    assert line(launch.end(received=signal.SIGTERM)) == "rank 0 was killed by SIGSEGV"
    launch.crash(1)
    launch.failures = launch.failures[1:]
    assert line(launch.end(received=signal.SIGTERM)) == "crash on 1"


# --- Files that are not whole ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_what_cannot_be_read_is_not_there(text: str, launch: Launch) -> None:
    launch.failed(0, 7)
    (launch.status / "error-0.json").write_text(text)
    (launch.status / "summary.json").write_text(text)
    (launch.status / "step-0").write_text("soon")
    ended = launch.end()
    assert (line(ended), ended.summary) == ("rank 0 ended with exit code 7 without saying why", None)


def test_a_rank_is_a_number(launch: Launch) -> None:
    (launch.status / "error-other.json").write_text("{}")
    launch.known(12)
    assert line(launch.end()) == "cause on 12"


# --- The signals themselves ------------------------------------------------------------------------------------------


@contextmanager
def signals(status: Path, *, own_loop: bool = True) -> Iterator[Requests]:
    with Signals() as state, state.reach(status, own_loop=own_loop):
        yield state.requests


def test_a_request_during_training_is_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step-0").write_text("3")
    before = signal.getsignal(signal.SIGTERM)
    with signals(tmp_path) as state:
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
    assert (state.received, state.interrupted, state.at_once) == (signal.SIGTERM, False, False)
    assert (tmp_path / "stop").exists()
    assert capfd.readouterr().err == "\nstopping after the current step, with a checkpoint\n"


def test_a_second_interrupt_ends_at_once_and_another_signal_does_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "step-0").write_text("3")
    with signals(tmp_path) as state:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert (state.interrupted, state.at_once) == (True, False)
        signal.raise_signal(signal.SIGINT)
    assert (state.received, state.at_once, state.trained) == (signal.SIGINT, True, True)
    assert "Ctrl-C again ends at once" in capfd.readouterr().err


def test_before_the_first_step_a_request_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "step-0").write_text("0")
    with signals(tmp_path) as state:
        signal.raise_signal(signal.SIGHUP)
    assert (state.at_once, state.trained) == (True, False)
    assert not (tmp_path / "stop").exists()


def test_between_two_generations_a_request_ends_at_once(tmp_path: Path) -> None:
    """Nobody reads any more what is written to the first one's directory. That it trained is remembered."""
    (tmp_path / "step-0").write_text("3")
    with Signals() as state:
        with state.reach(tmp_path, own_loop=True):
            pass
        (tmp_path / "pid-0").write_text(str(os.getpid()))
        signal.raise_signal(signal.SIGTERM)
    assert (state.requests.at_once, state.requests.trained) == (True, True)
    assert not (tmp_path / "stop").exists()


def test_signals_go_on_to_the_processes_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sent: list[tuple[int, int]] = []

    def kill(pid: int, number: int) -> None:
        sent.append((pid, number))
        if pid == 11:
            raise ProcessLookupError

    monkeypatch.setattr("accel_parallel.supervise.os.kill", kill)
    for rank, pid in enumerate(("11", "12", "soon")):
        (tmp_path / f"pid-{rank}").write_text(pid)
    with signals(tmp_path, own_loop=False) as state:
        signal.raise_signal(signal.SIGUSR1)
    assert sent == [(11, signal.SIGUSR1), (12, signal.SIGUSR1)]
    assert not state.at_once
    assert capfd.readouterr().err == "\nSIGUSR1 passed on to the script\n"


def test_the_kernel_counts_who_it_killed_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "oom_kill_disable 0\noom_kill 17\nother 3\n")
    assert _killed_for_memory() == 17
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "other 3\n")
    assert _killed_for_memory() == 0

    def fail(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", fail)
    assert _killed_for_memory() == 0


# --- A real launcher -------------------------------------------------------------------------------------------------


def refuse(restart: Restart) -> bool:
    raise AssertionError(f"would be restarted after {restart.ended}")


def test_a_launcher_that_cannot_start_says_why(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("distributed_type: 'NO'\nunheard_of: 1\n")
    said: list[str] = []
    plan = LaunchPlan(config, (), LOOP, (), 1)
    ended = run_generations(lambda: plan, lambda: said.append("begins"), refuse, max_restarts=2)
    assert said == ["begins"]
    assert ended is not None
    assert (ended.exit_code, ended.restartable) == (2, False)
    assert line(ended).startswith(f"ValueError: The config file at {config} had unknown keys (['unheard_of'])")


def test_an_interrupt_before_the_start_ends_it(tmp_path: Path) -> None:
    plan = LaunchPlan(tmp_path / "c.yaml", (), LOOP, (), 1)
    ended = run_generations(lambda: plan, lambda: signal.raise_signal(signal.SIGINT), refuse, max_restarts=2)
    assert ended is not None
    assert (ended.exit_code, line(ended)) == (130, "ended by SIGINT before the first step; nothing was trained")


def test_the_launcher_is_ended_whether_it_obeys_or_not() -> None:
    for ignores in (False, True):
        program = f"trap '{'' if ignores else '-'}' TERM; echo ready; read _"
        with subprocess.Popen(
            ["bash", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            _end_group(child)
            assert child.returncode == -signal.SIGKILL
