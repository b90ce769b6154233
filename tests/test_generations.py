"""Between two generations of a launch: how often there is another, what is said, and what is kept."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_parallel.cli.launch import Request, Result
from accel_parallel.cli.launch import launch as launch_target
from accel_parallel.ended import Ended
from accel_parallel.errors import Problem
from accel_parallel.launch import LOOP, LaunchPlan
from accel_parallel.metrics import open_lines, read_lines, to_line
from accel_parallel.restarts import Restart, run_generations
from accel_parallel.supervise import Signals, supervise
from tests.saved import checkpoint

KILLED = Ended(1, None, [Problem("rank 1 was killed by SIGKILL", code="worker")], restartable=True)
CRASHED = Ended(1, None, [Problem("KeyError: 'x'", code="crash")], "Traceback of x\n", restartable=True)
KNOWN = Ended(2, None, [Problem("the disk is full", code="run")])
DONE = Ended(0, None, [])


# --- How often --------------------------------------------------------------------------------------------------------


class Generations:
    """Stands in for `supervise`: ends as told, one generation after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: Ended) -> None:
        self.ends = list(ends)
        self.plans: list[LaunchPlan] = []
        self.during: Callable[[], object] = lambda: None
        monkeypatch.setattr("accel_parallel.restarts.supervise", self.supervise)

    def supervise(self, plan: LaunchPlan, signals: Signals) -> Ended:
        if signals.requests.at_once:
            return supervise(plan, signals)
        self.plans.append(plan)
        self.during()
        return self.ends.pop(0)

    def run(self, max_restarts: int, again: Callable[[Restart], bool] = lambda restart: True) -> Ended | None:
        plan = LaunchPlan(Path("c"), (), LOOP, (), 2)
        return run_generations(lambda: plan, lambda: None, again, max_restarts)


@pytest.mark.parametrize(
    ("ends", "max_restarts", "exit_code", "message"),
    [
        ([KILLED], 0, 1, "rank 1 was killed by SIGKILL"),
        ([KILLED, KILLED], 1, 1, "rank 1 was killed by SIGKILL, after 1 restart"),
        ([CRASHED, KILLED, CRASHED, KILLED], 3, 1, "rank 1 was killed by SIGKILL, after 3 restarts"),
        ([KNOWN], 3, 2, "the disk is full"),
        ([KILLED, KILLED, KNOWN], 3, 2, "the disk is full, after 2 restarts"),
        ([DONE], 3, 0, None),
        ([KILLED, CRASHED, DONE], 2, 0, None),
        ([KILLED, Ended(130, None, [Problem("ended by SIGTERM")])], 2, 130, "ended by SIGTERM"),
    ],
)
def test_as_often_as_allowed_and_no_more(
    ends: list[Ended], max_restarts: int, exit_code: int, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generations = Generations(monkeypatch, *ends)
    seen: list[tuple[int, int, Ended]] = []

    def again(restart: Restart) -> bool:
        seen.append((restart.number, restart.of, restart.ended))
        return True

    ended = generations.run(max_restarts, again)
    assert ended is not None
    assert (ended.exit_code, ended.restarts) == (exit_code, len(ends) - 1)
    assert [problem.message for problem in ended.problems] == ([message] if message else [])
    assert generations.ends == []
    assert [(number, of) for number, of, _ in seen] == [(n, max_restarts) for n in range(1, len(ends))]
    assert [failure.problems[0].message for *_, failure in seen] == [end.problems[0].message for end in ends[:-1]]


def test_nothing_starts_where_nothing_is_left_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    generations = Generations(monkeypatch, KILLED)
    assert generations.run(3, lambda restart: False) is None


def test_a_request_to_stop_is_never_answered_with_a_restart(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It came, and then a worker crashed: in the middle of the checkpoint, for example."""
    generations = Generations(monkeypatch, KILLED)
    generations.during = lambda: signal.raise_signal(signal.SIGUSR1)
    ended = generations.run(3)
    assert ended is not None
    assert (ended.exit_code, ended.restarts) == (1, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_generations_ends_the_launch(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(number)
    generations = Generations(monkeypatch, KILLED)
    monkeypatch.setattr("accel_parallel.supervise.subprocess.Popen", None)

    def again(restart: Restart) -> bool:
        signal.raise_signal(number)
        return True

    ended = generations.run(3, again)
    assert ended is not None
    assert ended.exit_code == 130
    assert len(generations.plans) == 1, "nothing was started"
    assert signal.getsignal(number) == before


# --- What is said and kept in between ---------------------------------------------------------------------------------


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACCEL_PARALLEL_SPEC", raising=False)
    return tmp_path


def launched(max_restarts: int, *script: str, machine_rank: int | None = None) -> tuple[Result, list[str]]:
    said: list[str] = []
    machines = ("distributed.num_machines=2", "distributed.main_process_ip=127.0.0.1")
    sets = machines if machine_rank is not None else ()
    run = None if script else Path("r")
    request = Request("ddp", sets=sets, run=run, machine_rank=machine_rank, max_restarts=max_restarts, script=script)
    return launch_target(request, said.append), said


def test_every_traceback_is_kept_and_every_restart_recorded(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generations = Generations(monkeypatch, CRASHED, KILLED, CRASHED)

    def trains() -> None:
        if len(generations.plans) == 2:
            checkpoint(Path("r"), 10)
            with Path("r/metrics.jsonl").open("a") as file:
                file.write('{"kind": "train", "st')

    generations.during = trains
    result, said = launched(2)
    first = "restart 1 of 2: KeyError: 'x' (traceback in r/traceback.txt); goes on from the start"
    second = "restart 2 of 2: rank 1 was killed by SIGKILL; goes on from step-00000010"
    assert said == ["starts r: ddp, 2 processes", first, second]
    assert list(map(str, result.problems)) == ["KeyError: 'x', after 2 restarts (traceback in r/traceback.txt)"]
    assert result.data == {"run": "r", "restarts": 2, "summary": None}
    assert Path("r/traceback.txt").read_text() == f"Traceback of x\n{first}\n\nTraceback of x\n"
    events = read_lines(Path("r/metrics.jsonl"))
    assert [(row["kind"], row["event"], row["step"], row["number"], row["message"]) for row in events] == [
        ("event", "restart", 0, 1, first), ("event", "restart", 10, 2, second),
    ]  # fmt: skip
    ports = {plan.launcher_arguments for plan in generations.plans}
    assert len(ports) == 3, "each generation meets at a port of its own"


def test_of_several_machines_the_first_writes_the_metrics_and_each_its_traceback(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Generations(monkeypatch, CRASHED, CRASHED)
    result, said = launched(1, machine_rank=1)
    assert "traceback in r/traceback-1.txt" in said[-1]
    assert "traceback in r/traceback-1.txt" in str(result.problems[0])
    assert not Path("r/metrics.jsonl").exists()
    assert not Path("r/traceback.txt").exists()


def test_a_run_that_is_complete_is_not_started_again(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generations = Generations(monkeypatch, KILLED)
    generations.during = lambda: checkpoint(Path("r"), 80)
    result, said = launched(1)
    assert said[1:] == ["rank 1 was killed by SIGKILL; nothing is left to do"]
    assert (result.exit_code, result.lines) == (0, ["r is complete (80 steps); --fresh starts a new run"])


def test_a_script_shows_each_traceback(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("s.py").write_text("")
    Generations(monkeypatch, CRASHED, CRASHED)
    result, said = launched(1, "s.py")
    line = "restart 1 of 1: KeyError: 'x'; starts the script again"
    assert said[1:] == ["Traceback of x", line, "Traceback of x"]
    assert result.data == {"script": ["s.py"], "restarts": 1}


def test_a_line_that_was_cut_off_is_ended_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        with open_lines(path) as file:
            file.write(to_line("event", {"step": step}) + "\n")
    assert path.read_text() == '{"kind": "event", "step": 1}\n{"kind": "event", "step": 2}\n'
    path.write_text('{"kind": "tr')
    with open_lines(path) as file:
        file.write("next\n")
    assert path.read_text() == '{"kind": "tr\nnext\n'
