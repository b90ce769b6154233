"""The command line itself: every way to be wrong is one line on stderr and exit code 2, and nothing is lost."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_parallel.cli import main
from accel_parallel.ended import Ended
from accel_parallel.errors import AccelParallelError, LaunchError, MismatchError, Problem, SpecError
from accel_parallel.launch import LaunchPlan, check_machines, plan_launch
from accel_parallel.runs import open_run
from accel_parallel.spec import load_spec
from accel_parallel.strategies import STRATEGIES
from accel_parallel.supervise import Signals
from tests.saved import checkpoint


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACCEL_PARALLEL_SPEC", raising=False)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of one command line in this process."""
    argv, sys.argv = sys.argv, ["accel-parallel", *arguments]
    try:
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
    finally:
        sys.argv = argv
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["launch", "fspd"], "unknown strategy 'fspd'; did you mean 'fsdp'?"),
        (["launch", "fsdp", "--spec", "nowhere.yaml"], "nowhere.yaml"),
        (["launch", "fsdp", "--set", "training.lrr=1"], "unknown key training.lrr; did you mean 'lr'?"),
        (["launch", "fsdp", "--set", "training.steps=many"], "training.steps is 'many'"),
        (["launch", "fsdp", "--set", "training.steps"], "an override is written section.key=value"),
        (
            ["launch", "ddp", "--set", "training.batch_size=33"],
            "training.batch_size 33 does not divide by 2 processes x 1 micro-batches = 2; nearest that do: 32 or 34",
        ),
        (["launch", "fsdp", "--num-processes", "3"], "nearest that do: 30 or 33"),
        (["launch", "fsdp", "--num-processes", "0"], "'0' is not a whole number from 1 on"),
        (["launch", "fsdp", "--stop-at", "soon"], "'soon' is not a whole number from 1 on"),
        (["launch", "fsdp", "--max-restarts", "-1"], "--max-restarts: '-1' is not a whole number from 0 on"),
        (["launch", "fsdp", "--max-restarts", "x"], "--max-restarts: 'x' is not a whole number from 0 on"),
        (["launch", "fsdp", "--max-restarts", "2", "--print-env"], "about a launch of ours, not about torchrun's"),
        (["launch", "ddp", "--set", "distributed.num_machines=2"], "2 machines need the address of machine 0"),
        (["launch"], "the following arguments are required: STRATEGY"),
        (["launch", "fsdp", "--fres"], "unrecognized arguments: --fres; did you mean '--fresh'?"),
        (["lanch", "fsdp"], "did you mean 'launch'?"),
        ([], "which verb? config, explain, rehearse, launch, prepare, checkpoints"),
        (["config", "--set", "fsdp.version=3"], "fsdp.version is 3"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith("error: ")
    assert words in err
    assert not Path("runs").exists()


def test_a_key_without_its_section_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "launch", "fsdp", "--set", "min_num_params=3")
    assert code == 2
    assert "(did you mean fsdp.min_num_params?)" in err
    assert "did you mean" not in run(capsys, "launch", "fsdp", "--set", "nothing=3")[2]


def test_all_problems_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.yaml").write_text("training:\n  lrr: 1\n  steps: many\nmodle: {}\n")
    code, _, err = run(capsys, "launch", "fsdp", "--spec", "my.yaml", "--set", "ddp.static_graph=7")
    assert code == 2
    lines = err.splitlines()
    assert len(lines) == 4
    assert {line.split(": ")[1] for line in lines} == {"my.yaml:2", "my.yaml:3", "my.yaml:4", "--set ddp.static_graph"}


def test_json_holds_the_problems(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "launch", "fspd", "--json")
    content = json.loads(out)
    assert err == ""
    assert list(content) == ["schema", "command", "ok", "exit_code", "data", "problems"]
    assert (content["schema"], content["command"], content["ok"], content["exit_code"]) == (1, "launch", False, code)
    assert set(content["problems"][0]) == {"code", "severity", "path", "line", "message", "hint"}


def test_config_writes_then_checks(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "config")
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()] == [
        ["written", f"accelerate_configs/{name}.yaml"] for name in ("parallelism", *STRATEGIES)
    ]
    assert run(capsys, "config", "--check")[0] == 0
    stale = Path("accelerate_configs/fsdp.yaml")
    stale.write_text(stale.read_text().replace("num_processes: 2", "num_processes: 3"))
    code, out, _ = run(capsys, "config", "--check")
    assert code == 1
    assert "-num_processes: 3" in out
    assert "num_processes: 3" in stale.read_text(), "--check writes nothing"


def test_another_clusters_files(capsys: pytest.CaptureFixture[str]) -> None:
    sets = ["--set", "distributed.processes_per_machine=8", "--set", "distributed.num_machines=2"]
    assert run(capsys, "config", *sets, "--out", "cluster")[0] == 0
    text = Path("cluster/fsdp.yaml").read_text()
    assert "num_processes: 16" in text
    assert "num_machines: 2" in text


def test_dry_run_prints_file_and_command_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "fsdp.min_num_params=2M", "--max-restarts", "3"]
    code, out, _ = run(capsys, "launch", "fsdp", "--dry-run", *options)
    assert code == 0
    assert "# accel-parallel would restart this up to 3 times" in out
    assert "distributed_type: FSDP" in out
    assert "NO_WRAP" in out
    assert out.splitlines()[-1].startswith("accelerate launch --config_file runs/fsdp-NNN/accelerate.yaml ")
    assert not Path("runs").exists()


def test_named_run_of_another_specification_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    spec = load_spec()
    open_run(spec, "fsdp", explicit=Path("mine"))
    before = Path("mine/spec.yaml").read_text()
    code, _, err = run(capsys, "launch", "fsdp", "--run", "mine", "--set", "training.seed=2")
    assert code == 2
    assert "mine cannot go on with training.seed 1234 -> 2: samples would be repeated or left out" in err
    assert "--fresh" in err
    assert Path("mine/spec.yaml").read_text() == before


def test_a_folder_that_is_no_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("docs").mkdir()
    Path("docs/thesis.txt").write_text("years of work")
    code, _, err = run(capsys, "launch", "fsdp", "--run", "docs")
    assert code == 2
    assert "docs is not a run directory and not empty" in err
    assert [path.name for path in Path("docs").iterdir()] == ["thesis.txt"]


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/sys").exists(), reason="needs a place root cannot write to")
def test_a_run_directory_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "launch", "fsdp", "--run", "/proc/sys/accel_parallel")
    assert code == 2
    assert "cannot write to /proc/sys/accel_parallel" in err
    assert len(err.splitlines()) == 1


def test_runs_in_the_way_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").write_text("a file")
    code, _, err = run(capsys, "launch", "fsdp")
    assert code == 2
    assert "cannot write to runs/fsdp-001" in err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ([], ["config"], ["launch"], ["prepare"], ["checkpoints"], ["export"], ["generate"]):
        arguments = [*verb, "--help"]
        code, out, err = run(capsys, *arguments)
        assert (code, err) == (0, "")
        assert max(map(len, out.splitlines())) <= 80
    assert run(capsys, "--version")[1].strip() == "0.1.0"


def test_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} -m accel_parallel launch fsdp --dry-run --json | true"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.stderr == ""


# --- Machines and ports -----------------------------------------------------------------------------------------------


def test_several_machines_need_a_number_each() -> None:
    sets = ["distributed.num_machines=2", "distributed.main_process_ip=10.0.0.1"]
    spec = load_spec(None, sets)
    with pytest.raises(LaunchError, match="which one is this"):
        check_machines(spec, None)
    for rank in (-1, 2):
        with pytest.raises(LaunchError, match=f"--machine-rank {rank} is not one of 0 to 1"):
            check_machines(spec, rank)
    check_machines(spec, 1)
    plan = plan_launch(spec, Path("run"), [], machine_rank=1)
    assert plan.launcher_arguments == ("--machine_rank", "1")


def test_a_busy_port_is_replaced_on_one_machine() -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        plan = plan_launch(
            load_spec(None, [f"distributed.main_process_port={port}"]), Path("run"), [], machine_rank=None
        )
    assert plan.note is not None
    assert f"port {port} is in use" in plan.note
    assert plan.launcher_arguments[0] == "--main_process_port"
    assert plan.launcher_arguments[1] != str(port)


# --- Errors -----------------------------------------------------------------------------------------------------------


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    import accel_parallel.errors as errors

    classes = {AccelParallelError, *AccelParallelError.__subclasses__()}
    assert errors.__doc__ is not None
    drawn = {line.strip("├└─ ").split()[0] for line in errors.__doc__.splitlines() if "Error" in line and "  " in line}
    assert drawn == {cls.__name__ for cls in classes}
    assert MismatchError.exit_code == 1
    assert SpecError.exit_code == 2


# --- What a launch does before and after the processes ----------------------------------------------------------------


class Supervised:
    """Stands in for `supervise`: remembers what it was to start, lets `during` happen, and ends as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[LaunchPlan] = []
        self.ends = Ended(0, None, [])
        self.during: Callable[[LaunchPlan], object] = lambda plan: None
        monkeypatch.setattr("accel_parallel.restarts.supervise", self.supervise)

    def supervise(self, plan: LaunchPlan, signals: Signals) -> Ended:
        self.plans.append(plan)
        self.during(plan)
        return self.ends


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> Supervised:
    return Supervised(monkeypatch)


SUMMARY = {
    "run": "runs/fsdp-001", "strategy": "fsdp", "world_size": 2, "device": "cpu", "step": 80, "steps": 80,
    "tokens": 1, "first_train_loss": 7.5, "last_train_loss": 5.0, "val_loss": 5.0, "unigram_entropy": 5.5,
    "val_tokens": 1000, "tokens_per_sec": None, "peak_memory_gib": [1.0, 1.0], "checkpoint": "c", "prompt": "p",
    "sample": "s",
}  # fmt: skip


def test_a_launch_starts_a_run_then_continues_it_then_is_complete(
    supervised: Supervised, capsys: pytest.CaptureFixture[str]
) -> None:
    supervised.ends = Ended(0, SUMMARY, [])
    code, out, err = run(capsys, "launch", "fsdp", "--cpu", "--keep-precision", "--stop-at", "40")
    assert (code, err) == (0, "starts runs/fsdp-001: fsdp, 2 processes\n")
    assert "speed            nothing to do" in out
    (plan,) = supervised.plans
    assert plan.config.read_text().startswith("# fsdp: a shard in each process")
    assert load_spec(Path("runs/fsdp-001/spec.yaml")).fsdp.version == 2
    assert plan.worker_arguments == (
        *("--spec", "runs/fsdp-001/spec.yaml", "--run", "runs/fsdp-001"),
        *("--cpu", "--keep-precision", "--stop-at", "40"),
    )
    checkpoint(Path("runs/fsdp-001"), 40)
    code, out, err = run(capsys, "launch", "fsdp", "--json")
    assert err == "continues runs/fsdp-001: fsdp, 2 processes\n"
    assert json.loads(out)["data"] == {"run": "runs/fsdp-001", "restarts": 0, "summary": SUMMARY}
    checkpoint(Path("runs/fsdp-001"), 80)
    Path("runs/fsdp-001/summary.json").write_text(json.dumps({"kind": "summary", **SUMMARY}))
    code, out, err = run(capsys, "launch", "fsdp")
    assert (code, out, err) == (0, "runs/fsdp-001 is complete (80 steps); --fresh starts a new run\n", "")
    data = json.loads(run(capsys, "launch", "fsdp", "--json")[1])["data"]
    assert (data["complete"], data["summary"]["step"]) == (True, 80)
    assert len(supervised.plans) == 2, "a complete run starts nothing"


def test_a_launch_that_fails_says_so_and_leaves_nothing_half_written(
    supervised: Supervised, capsys: pytest.CaptureFixture[str]
) -> None:
    half = Path("runs/single-001/checkpoints/.partial-step-00000005")
    supervised.during = lambda plan: half.mkdir(parents=True)
    supervised.ends = Ended(1, None, [Problem("KeyError: 'x'", code="crash")], "Traceback ...\n")
    code, out, err = run(capsys, "launch", "single")
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        "starts runs/single-001: single, 1 process",
        "error: KeyError: 'x' (traceback in runs/single-001/traceback.txt)",
    ]
    assert Path("runs/single-001/traceback.txt").read_text() == "Traceback ...\n"
    assert not half.exists()


def test_only_the_first_machine_clears_up(supervised: Supervised, capsys: pytest.CaptureFixture[str]) -> None:
    half = Path("r/checkpoints/.partial-step-00000005")
    supervised.during = lambda plan: half.mkdir(parents=True)
    supervised.ends = Ended(1, None, [Problem("lost")])
    sets = ["--set", "distributed.num_machines=2", "--set", "distributed.main_process_ip=127.0.0.1"]
    assert run(capsys, "launch", "ddp", *sets, "--run", "r", "--machine-rank", "1")[0] == 1
    assert half.exists()


def test_notes_come_before_the_start(supervised: Supervised, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "launch", "ddp")
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        sets = ["--set", f"distributed.main_process_port={port}", "--set", "training.lr=5e-4"]
        err = run(capsys, "launch", "ddp", *sets)[2].splitlines()
        Path("s.py").write_text("")
        script = run(capsys, "launch", "ddp", *sets[:2], "--", "s.py")[2].splitlines()
    assert err[0] == "runs/ddp-001 holds another specification (training.lr 0.001 -> 0.0005): starting a new run"
    assert err[1].startswith(f"port {port} is in use: ")
    assert err[2] == "starts runs/ddp-002: ddp, 2 processes"
    assert script[0].startswith(f"port {port} is in use: ")


def test_a_script_gets_a_file_that_is_gone_afterwards(
    supervised: Supervised, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("s.py").write_text("")
    texts: list[str] = []
    supervised.during = lambda plan: texts.append(plan.config.read_text())
    supervised.ends = Ended(1, None, [Problem("ValueError: x", code="crash")], "Traceback ...\n")
    code, out, err = run(capsys, "launch", "fsdp", "--json", "--", "s.py", "--json", "a")
    assert code == 1
    assert json.loads(out)["data"] == {"script": ["s.py", "--json", "a"], "restarts": 0}
    assert err == "starts s.py --json a: fsdp, 2 processes\nTraceback ...\n"
    assert "distributed_type: FSDP" in texts[0]
    assert supervised.plans[0].worker_arguments == ("s.py", "--json", "a")
    assert not supervised.plans[0].config.exists()
    assert not Path("runs").exists()


def test_a_full_disk_is_one_line(
    supervised: Supervised, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("accel_parallel.cli.generations.write_atomic", fail)
    code, _, err = run(capsys, "launch", "single")
    assert (code, err) == (2, "error: cannot write runs/single-001/accelerate.yaml: No space left on device\n")
    assert supervised.plans == []


def test_what_interrupts_a_verb_is_one_line(supervised: Supervised, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(plan: LaunchPlan) -> None:
        raise KeyboardInterrupt

    supervised.during = interrupt
    code, _, err = run(capsys, "launch", "single")
    assert (code, err.splitlines()[-1]) == (130, "error: interrupted")

    def fail(plan: LaunchPlan) -> None:
        raise OSError(24, "Too many open files")

    supervised.during = fail
    code, _, err = run(capsys, "launch", "single")
    assert (code, err.splitlines()[-1]) == (2, "error: Too many open files")


def test_a_standard_output_that_is_full_is_one_line() -> None:
    command = f"{sys.executable} -m accel_parallel launch single --dry-run > /dev/full"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "error: cannot write to the standard output: No space left on device\n"


def test_prepare_is_the_other_tower_with_the_same_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def call(command: list[str]) -> int:
        commands.append(command[1:])
        return 7

    monkeypatch.setattr(subprocess, "call", call)
    assert run(capsys, "prepare", "--spec", "s.yaml", "--set", "data.recipe=x", "--set", "training.steps=3")[0] == 7
    assert run(capsys, "prepare")[0] == 7
    module = ["-m", "accel_parallel.train.prepare"]
    assert commands == [
        [*module, "--spec", "s.yaml", "--set", "data.recipe=x", "--set", "training.steps=3"],
        module,
    ]
