"""The ways in, for real: `accel-parallel launch`, plain `accelerate launch`, torchrun, several machines, scripts."""

import json
import re
import socket
import subprocess
from pathlib import Path

import pytest

from accel_parallel.checkpoints import complete_checkpoints
from tests.commands import BIN, command, errors, free_port, launch, losses, make_home, set_options, start


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, toy: list[str]) -> Path:
    return make_home(tmp_path_factory.mktemp("home"), toy)


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
    assert "\x1b" not in launched.stdout + launched.stderr, "nothing but text in a pipe"


def test_again_it_says_that_the_run_is_complete(home: Path, launched: subprocess.CompletedProcess[str]) -> None:
    before = (home / "runs/fsdp-001/metrics.jsonl").read_text()
    again = launch(home, "fsdp")
    assert again.returncode == 0
    assert again.stdout == "runs/fsdp-001 is complete (20 steps); --fresh starts a new run\n"
    assert (home / "runs/fsdp-001/metrics.jsonl").read_text() == before


def test_plain_accelerate_launch_is_the_same_run(home: Path, launched: subprocess.CompletedProcess[str]) -> None:
    """No launcher of ours: the committed file, the same loop, the same losses to the last bit."""
    arguments = ["launch", "--config_file", "accelerate_configs/fsdp.yaml", "--main_process_port", free_port()]
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
    (error,) = errors(result.stderr)
    assert words in error
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1] == error


def test_torchrun_is_the_same_run(home: Path, launched: subprocess.CompletedProcess[str]) -> None:
    """The environment carries the strategy: nothing else tells torchrun's workers that they are to be sharded."""
    script = (
        'eval "$(accel-parallel launch fsdp --print-env)" && '
        'torchrun --standalone --nproc_per_node "$ACCEL_PARALLEL_NUM_PROCESSES" '
        "-m accel_parallel.train --run-dir runs/torchrun"
    )
    result = command(["bash", "-c", script], home)
    assert result.returncode == 0, result.stderr
    assert "fsdp on 2 x cpu, runs/torchrun" in result.stdout
    assert losses(home / "runs/torchrun") == losses(home / "runs/fsdp-001")


def test_torchrun_with_fewer_processes_than_promised_is_refused(home: Path) -> None:
    script = (
        'eval "$(accel-parallel launch ddp --print-env)" && '
        "torchrun --standalone --nproc_per_node 1 -m accel_parallel.train --run-dir runs/fewer"
    )
    result = command(["bash", "-c", script], home)
    assert result.returncode == 1
    (error,) = errors(result.stderr)
    assert "asked for 2 processes, got 1" in error
    assert not (home / "runs/fewer").exists()


def test_two_machines_that_are_one(home: Path) -> None:
    """Two launchers on this host, a process each: the losses of one machine with two."""
    arguments = ["ddp", "--run", "runs/machines", "--stop-at", "6", "--num-processes", "1"]
    sets = ["distributed.num_machines=2", "distributed.main_process_ip=127.0.0.1"]
    arguments += set_options([*sets, f"distributed.main_process_port={free_port()}"])
    machines = [start(home, *arguments, "--machine-rank", str(rank)) for rank in (0, 1)]
    ends = [machine.communicate(timeout=120) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], ends
    assert "ddp on 2 x cpu" in ends[0][0]
    assert ends[1][0] == ""
    one = launch(home, "ddp", "--run", "runs/one", "--stop-at", "6")
    assert one.returncode == 0
    assert losses(home / "runs/machines") == losses(home / "runs/one")


@pytest.mark.slow
def test_two_machines_of_plain_accelerate_from_one_file(home: Path, launched: subprocess.CompletedProcess[str]) -> None:
    """The same YAML on both, only --machine_rank differs."""
    sets = ["distributed.num_machines=2", "distributed.processes_per_machine=1"]
    sets += ["distributed.main_process_ip=127.0.0.1", f"distributed.main_process_port={free_port()}"]
    written = command([str(BIN / "accel-parallel"), "config", "--out", "cluster", *set_options(sets)], home)
    assert written.returncode == 0, written.stderr
    worker = ["-m", "accel_parallel.train", "--run", "runs/plain-machines"]
    launcher = [str(BIN / "accelerate"), "launch", "--config_file", "cluster/fsdp.yaml"]
    machines = [
        subprocess.Popen(
            [*launcher, "--machine_rank", str(rank), *worker],
            cwd=home, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    ends = [machine.communicate(timeout=120) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], ends
    assert losses(home / "runs/plain-machines") == losses(home / "runs/fsdp-001")


SCRIPT = """\
import sys
import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
import beside

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
mine = data[accelerator.process_index :: accelerator.num_processes]
for _ in range(8):
    with accelerator.accumulate(model):
        loss = (model(mine) - mine.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
total = accelerator.gather(loss.detach().reshape(1)).mean().item()
sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
accelerator.print("RESULT", accelerator.num_processes, sharded, round(total, 5), beside.NAME, *sys.argv[1:])
if "--fail" in sys.argv and accelerator.process_index == 1:
    raise ValueError("the script's own error")
if "--wait" in sys.argv:
    import time
    accelerator.print("WAITING", flush=True)
    time.sleep(300)
"""


@pytest.fixture(scope="module")
def script(home: Path) -> Path:
    (home / "mine").mkdir()
    (home / "mine/beside.py").write_text("NAME = 'neighbour'\n")
    path = home / "mine/script.py"
    path.write_text(SCRIPT)
    return path


def result_of(stdout: str) -> list[str]:
    (line,) = [line for line in stdout.splitlines() if line.startswith("RESULT")]
    return line.split()[1:]


def test_a_script_runs_under_the_same_file_really_sharded(home: Path, script: Path) -> None:
    one = launch(home, "single", "--", str(script), "--lr", "3")
    ddp = launch(home, "ddp", "--", str(script), "--lr", "3")
    fsdp = launch(home, "fsdp", "--", str(script), "--lr", "3")
    (home / "mine/file.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 2\n"
        "fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: SIZE_BASED_WRAP, fsdp_min_num_params: 100}\n"
    )
    file = launch(home, "mine/file.yaml", "--", str(script), "--lr", "3")
    for result in (one, ddp, fsdp, file):
        assert result.returncode == 0, result.stderr
    rest = ["neighbour", "--lr", "3"]
    loss = result_of(one.stdout)[2]
    assert float(loss) > 0
    assert result_of(one.stdout) == ["1", "False", loss, *rest]
    assert result_of(ddp.stdout) == ["2", "False", loss, *rest]
    assert result_of(fsdp.stdout) == result_of(file.stdout) == ["2", "True", loss, *rest]
    assert "on CPU: device: accelerator -> cpu" in fsdp.stderr
    assert not (home / "mine/runs").exists()


def test_a_failing_script_shows_its_own_error_once(home: Path, script: Path) -> None:
    result = launch(home, "fsdp", "--", str(script), "--fail")
    assert result.returncode == 1
    assert errors(result.stderr) == ["error: ValueError: the script's own error (on rank 1)"]
    assert result.stderr.count("Traceback") == 1
    assert "runpy" not in result.stderr
    assert "elastic" not in result.stderr


@pytest.mark.slow
def test_ddp_of_one_process_is_ddp(home: Path) -> None:
    result = launch(home, "ddp", "--num-processes", "1", "--run", "runs/ddp-of-one", "--stop-at", "1")
    assert result.returncode == 0, result.stderr
    observed = json.loads((home / "runs/ddp-of-one/environment.json").read_text())["observed"]
    assert (observed["parallelism"], observed["world_size"]) == ("ddp", 1)


@pytest.mark.slow
def test_a_module_runs_as_python_m_runs_it(home: Path) -> None:
    """Accelerate's own test of its collectives, unchanged, on CPU processes."""
    result = launch(home, "ddp", "--", "-m", "accelerate.test_utils.scripts.test_ops")
    assert result.returncode == 0, result.stderr
    assert "testing reduce_mean" in result.stdout
