"""Scripts as people write them, rehearsed unmodified: what is seen against what can be computed by hand."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands import BIN, alive, command

SCRIPTS = Path(__file__).parent / "scripts"
DDP = "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: 'no'\n"
FSDP = (
    "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: 'no'\n"
    "fsdp_config:\n  fsdp_version: {version}\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    "  fsdp_state_dict_type: FULL_STATE_DICT\n  fsdp_transformer_layer_cls_to_wrap: {cls}\n"
)
CHECKS = ["runs", "asked", "sharded", "same_numbers", "sends"]


def rehearse(folder: Path, *words: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """Exit code, the rehearsals by name, and what was said."""
    result = command([str(BIN / "accel-parallel"), "rehearse", "--json", *words], folder, {"OMP_NUM_THREADS": "2"})
    content = json.loads(result.stdout)
    assert content["ok"] is (result.returncode == 0)
    return result.returncode, {item["name"]: item for item in (content["data"] or {}).get("rehearsals", [])}, (
        result.stderr + "".join(problem["message"] + str(problem["hint"]) for problem in content["problems"])
    )  # fmt: skip


def answers(rehearsal: dict[str, Any]) -> list[bool | None]:
    assert [check["name"] for check in rehearsal["checks"]] == CHECKS
    return [check["holds"] for check in rehearsal["checks"]]


def check(rehearsal: dict[str, Any], name: str) -> dict[str, Any]:
    return next(item for item in rehearsal["checks"] if item["name"] == name)


def write_files(folder: Path, cls: str) -> None:
    (folder / "ddp.yaml").write_text(DDP)
    for version in (1, 2):
        (folder / f"v{version}.yaml").write_text(FSDP.format(version=version, cls=cls))


# Class to wrap, arguments, elements of the models that are trained, backward passes of a step that DDP reduces.
CASES = {
    "manual_accumulation": ("Block", "", [8738], 2),
    "gather_metrics": ("Block", "", [4290], 1),
    "several_prepares": ("Block", "", [2640, 5378], 1),
    "save_and_load": ("Block", "--folder state", [2404], 1),
    "llama": ("LlamaDecoderLayer", "", [21664], 1),
}


@pytest.fixture(scope="module", params=CASES)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """A script's name, and its rehearsals under DDP and both versions of FSDP, each compared with DDP."""
    folder, name = tmp_path_factory.mktemp(request.param), request.param
    cls, words, _, _ = CASES[name]
    write_files(folder, cls)
    code, found, said = rehearse(
        folder, "ddp.yaml", "v1.yaml", "v2.yaml", "--against-ddp", "--", f"{SCRIPTS}/{name}.py", *words.split()
    )
    assert code == 0, (said, [item["checks"] for item in found.values()])
    return name, found


def least(rank: dict[str, Any]) -> dict[str, int]:
    """Bytes by kind in the window that holds least."""
    windows = [{item["kind"]: item["tensor_bytes"] for item in w["collectives"]} for w in rank["windows"]]
    return min(windows, key=lambda window: sum(window.values()))


def test_a_script_passes_and_learns_what_it_learns_under_ddp(seen: tuple[str, dict[str, Any]]) -> None:
    found = seen[1]
    assert answers(found["ddp"]) == [True, True, True, None, True]
    assert answers(found["v1"]) == answers(found["v2"]) == [True] * 5
    for version in ("v1", "v2"):
        same = check(found[version], "same_numbers")["summary"]
        assert "of DDP (limit 1e-05)" in same or "equal to DDP's bit for bit" in same


def test_replicas_hold_and_reduce_everything(seen: tuple[str, dict[str, Any]]) -> None:
    name, found = seen
    _, _, sizes, passes = CASES[name]
    for rank in found["ddp"]["facts"]["ranks"]:
        assert (rank["ended"], rank["unseen"]) == ("done", [])
        trained = [model for model in rank["models"] if model["trainable_elements"]]
        assert [model["parallelism"] for model in trained] == ["ddp"] * len(sizes)
        assert [model["held_bytes"] for model in trained] == [4 * size for size in sizes]
        assert sorted(item["gradient_bytes"] for item in rank["optimizers"]) == sorted(4 * size for size in sizes)
        # Of several_prepares: the critic is reduced twice, for the generator too, and a loss.
        extra = 4 * sizes[1] + 4 if name == "several_prepares" else 0
        assert least(rank)["all_reduce"] == passes * sum(4 * size for size in sizes) + extra


@pytest.mark.parametrize("version", [1, 2])
def test_shards_are_halves(seen: tuple[str, dict[str, Any]], version: int) -> None:
    name, found = seen
    cls, _, sizes, _ = CASES[name]
    for rank in found[f"v{version}"]["facts"]["ranks"]:
        assert rank["unseen"] == []
        trained = [model for model in rank["models"] if model["trainable_elements"]]
        assert [model["parallelism"] for model in trained] == [f"fsdp version {version}"] * len(sizes)
        assert [model["held_bytes"] for model in trained] == [2 * size for size in sizes]
        assert sorted(item["gradient_bytes"] for item in rank["optimizers"]) == sorted(2 * size for size in sizes)
        for model in trained:
            assert list(model["units"].values()).count(cls) == model["class_counts"][cls]
            assert model["tied_before"] == model["tied_after"]
            assert model["resharded_after_forward"] is True
            assert model["compute_dtypes"] == ["float32"]


def test_what_a_script_decides_itself_is_told(seen: tuple[str, dict[str, Any]]) -> None:
    name, found = seen
    notes = found["v2"]["notes"]
    sets = ["the script sets gradient_accumulation_steps: 2, not 1 of the file"] if name == "gather_metrics" else []
    assert notes == sets
    logged = {entry["key"] for entry in found["v2"]["facts"]["ranks"][0]["logged_losses"]}
    assert logged == {"gather_metrics": {"train/loss", "eval_loss"}, "several_prepares": {"loss"},
                      "llama": {"train_loss"}}.get(name, set())  # fmt: skip


def test_a_script_that_brings_fsdp_is_refused_or_allowed(tmp_path: Path) -> None:
    write_files(tmp_path, "Linear")
    script = ("--", f"{SCRIPTS}/own_plugin.py")
    code, found, _ = rehearse(tmp_path, "ddp.yaml", *script)
    assert code == 1
    assert "--fsdp-in-script" in check(found["ddp"], "runs")["mismatches"][0]
    for version in (1, 2):
        words = ("--version", str(version), "--offload")
        code, found, said = rehearse(tmp_path, "ddp.yaml", "--fsdp-in-script", *script, *words)
        assert (code, answers(found["ddp"])) == (0, [True, True, True, None, True]), said
        assert "the script brings its own fsdp_plugin, which decides" in found["ddp"]["notes"]
        assert "the script sets gradient_accumulation_steps: 3, not 1 of the file" in found["ddp"]["notes"]
        for rank in found["ddp"]["facts"]["ranks"]:
            (model,) = rank["models"]
            assert (model["parallelism"], model["own_plugin"]) == (f"fsdp version {version}", True)
            assert model["held_bytes"] == 2 * (16 * 64 + 64 + 64 * 2 + 2)
            assert [w["backward_passes"] for w in rank["windows"]] == [3, 3]
            assert least(rank)["reduce_scatter"] == model["whole_bytes"]
            keys = [item["key"] for item in rank["substitutions"]]
            assert "fsdp_offload_params" in keys
            assert ("fsdp_sync_module_states" in keys) is (version == 1)


def test_a_trainer_of_transformers_is_sharded_too(tmp_path: Path) -> None:
    write_files(tmp_path, "LlamaDecoderLayer")
    code, found, said = rehearse(tmp_path, "v1.yaml", "v2.yaml", "--against-ddp", "--", f"{SCRIPTS}/trainer.py")
    assert code == 0, (said, [item["checks"] for item in found.values()])
    for version in (1, 2):
        assert answers(found[f"v{version}"]) == [True] * 5
        for rank in found[f"v{version}"]["facts"]["ranks"]:
            (model,) = rank["models"]
            assert (model["parallelism"], model["held_bytes"]) == (f"fsdp version {version}", 2 * 21664)
            assert rank["optimizer_steps"] == 5


def test_accelerates_own_script_passes(tmp_path: Path) -> None:
    (tmp_path / "ddp.yaml").write_text(DDP)
    code, found, said = rehearse(tmp_path, "ddp.yaml", "--", "-m", "accelerate.test_utils.scripts.test_script")
    assert (code, answers(found["ddp"])) == (0, [True, True, True, None, True]), said
    assert found["ddp"]["facts"]["ranks"][0]["optimizer_steps"] == 96
    assert "All rng are properly synched." in said


FAULTS = {
    "raises": ("ddp", "runs", "ValueError: a number that is none (on rank 1)"),
    "sleeps": ("ddp", "runs", "ValueError: the other one sleeps (on rank 1)"),
    "dies": ("v2", "runs", "process ended with exit code 9 (on rank 1)"),
    "exits": ("ddp", "runs", "the script ended with exit code 3 (on rank 1)"),
    "unreduced": ("ddp", "sends", "a step reduces 0 bytes, the gradients of a model are 2,208: processes learn by"),
    "unprepared": ("v2", "sharded", "no model that is trained was prepared: nothing is sharded"),
    "other_rate": ("v2", "same_numbers", "under DDP"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    write_files(tmp_path, "Linear")
    name, question, words = FAULTS[fault]
    code, found, _ = rehearse(
        tmp_path, f"{name}.yaml", *(["--against-ddp"] if name == "v2" else []), "--", f"{SCRIPTS}/faulty.py", fault
    )
    assert code == 1
    (mismatch,) = check(found[name], question)["mismatches"]
    assert words in mismatch
    assert [item["name"] for item in found[name]["checks"] if item["holds"] is False] == [question]


def test_a_model_of_another_type_is_no_mismatch_and_told(tmp_path: Path) -> None:
    write_files(tmp_path, "Linear")
    code, found, said = rehearse(tmp_path, "v2.yaml", "--", f"{SCRIPTS}/faulty.py", "bfloat16")
    assert (code, answers(found["v2"])) == (0, [True, True, True, None, True]), (said, found["v2"]["checks"])
    assert found["v2"]["notes"] == ["the script makes Sequential in bfloat16, whatever the precision is"]


def test_a_script_without_a_seed_is_no_mismatch(tmp_path: Path) -> None:
    write_files(tmp_path, "Linear")
    code, found, _ = rehearse(tmp_path, "v2.yaml", "--against-ddp", "--", f"{SCRIPTS}/faulty.py", "unseeded")
    same = check(found["v2"], "same_numbers")
    assert (code, same["holds"]) == (0, None)
    assert "twice under DDP the script's losses are" in same["summary"]


def test_without_a_policy_embeddings_are_units_all_the_same(tmp_path: Path) -> None:
    """Of a model of transformers, in version 2: no mismatch besides that no policy is named."""
    lines = [line for line in FSDP.format(version=2, cls="").splitlines(keepends=True) if "wrap" not in line]
    (tmp_path / "v2.yaml").write_text("".join(lines))
    code, found, _ = rehearse(tmp_path, "v2.yaml", "--", f"{SCRIPTS}/llama.py")
    assert code == 1
    assert answers(found["v2"]) == [True, False, True, None, True]
    assert "no layer is wrapped" in check(found["v2"], "asked")["mismatches"][0]
    assert len(found["v2"]["facts"]["ranks"][0]["models"][0]["units"]) > 1


def test_without_a_class_to_wrap_the_whole_model_is_one_unit(tmp_path: Path) -> None:
    (tmp_path / "v2.yaml").write_text("".join(FSDP.format(version=2, cls="").splitlines(keepends=True)[:-1]))
    code, found, _ = rehearse(tmp_path, "v2.yaml", "--", f"{SCRIPTS}/faulty.py", "nothing")
    assert code == 1
    assert (
        "no class to wrap is named, and Sequential names none itself" in check(found["v2"], "sharded")["mismatches"][0]
    )


WRONG = {
    "no_file": (["ddp", "--", "no.py"], "no.py is not a file"),
    "no_module_name": (["ddp", "--", "-m"], "-m names no module"),
    "no_yaml": (["no.yaml", "--", "here.py"], "cannot read no.yaml"),
    "no_script": (["ddp", "--against-ddp"], "--against-ddp belongs to a script of yours"),
    "scale": (["ddp", "--scale", "8", "--", "here.py"], "--scale simulates the model of the specification"),
    "loop": (
        ["ddp", "--set", "training.steps=3", "--", "here.py"],
        "--set training.steps belongs to the",
    ),
    "nothing": (["--", "here.py"], "rehearse what?"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_one_line_and_exit_2(case: str, tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text("")
    words, expected = WRONG[case]
    result = command([str(BIN / "accel-parallel"), "rehearse", *words], tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert expected in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_what_is_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "sleep.py").write_text(
        "import os, time\nopen(os.environ['RANK'], 'w').write(str(os.getpid()))\nos.rename(os.environ['RANK'], "
        "'pid-' + os.environ['RANK'])\ntime.sleep(1000)"
    )
    words = [str(BIN / "accel-parallel"), "rehearse", "ddp", "--", "sleep.py"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 2, 120)
        pids = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    if number is signal.SIGINT:
        assert (process.returncode, stderr.splitlines()[-1]) == (130, "error: interrupted")
    wait_until(lambda: not any(map(alive, pids)), 30)


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_file_that_cpus_cannot_run_is_told(tmp_path: Path) -> None:
    (tmp_path / "zero.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 2\n")
    code, found, _ = rehearse(tmp_path, "zero.yaml", "--", f"{SCRIPTS}/faulty.py", "nothing")
    assert code == 1
    assert (
        "DEEPSPEED: a script is rehearsed on CPUs under NO or MULTI_GPU" in found["zero"]["checks"][0]["mismatches"][0]
    )


def test_a_script_is_as_it_is_without_us(tmp_path: Path) -> None:
    """Nothing of it is imported a second time, a loader's workers are forked, and what it leaves running is ended."""
    (tmp_path / "alone.yaml").write_text(FSDP.format(version=2, cls="Linear").replace("processes: 2", "processes: 1"))
    (tmp_path / "bare.py").write_text(
        "import subprocess, torch\n"
        "from accelerate import Accelerator\n"
        "from torch.utils.data import DataLoader\n"
        "accelerator = Accelerator()\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))\n"
        "model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))\n"
        "for batch in DataLoader(range(4), num_workers=1, collate_fn=lambda items: torch.ones(2, 4) * items[0]):\n"
        "    accelerator.backward(model(batch).sum())\n"
        "    optimizer.step()\n"
        "left = subprocess.Popen(['sleep', '1000'])\n"
        "open(f'left-{accelerator.process_index}', 'w').write(str(left.pid))\n"
    )
    for name in ("alone.yaml", "ddp"):
        code, found, said = rehearse(tmp_path, name, "--", "bare.py")
        assert code == 0, (said, found)
        assert not any(alive(int(path.read_text())) for path in tmp_path.glob("left-*"))
    assert len(list(tmp_path.glob("left-*"))) == 2


def test_a_missing_module_is_told(tmp_path: Path) -> None:
    code, found, _ = rehearse(tmp_path, "ddp", "--", "-m", "no_such_module")
    assert code == 1
    assert "there is no module 'no_such_module'" in check(found["ddp"], "runs")["mismatches"][0]


def test_the_first_process_is_heard_and_stdout_is_data(tmp_path: Path) -> None:
    (tmp_path / "speak.py").write_text("import os; print('heard', os.environ['RANK'])")
    result = command([str(BIN / "accel-parallel"), "rehearse", "ddp", "--", "speak.py"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert "heard 0" in result.stderr
    assert "heard 1" not in result.stderr
    assert "heard" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) < 80
    assert [path.name for path in tmp_path.iterdir()] == ["speak.py"]


def test_a_process_group_that_a_script_destroys_is_not_freed(tmp_path: Path) -> None:
    """Freeing one of gloo hangs now and then, after all work was done."""
    (tmp_path / "leave.py").write_text(
        "import gc, weakref\n"
        "import torch.distributed as dist\n"
        "from accelerate import Accelerator\n"
        "accelerator = Accelerator()\n"
        "groups = [weakref.ref(dist.group.WORLD), weakref.ref(dist.new_group([0, 1]))]\n"
        "accelerator.end_training()\n"
        "assert not dist.is_initialized()\n"
        "gc.collect()\n"
        "assert all(group() is not None for group in groups)\n"
    )
    code, found, said = rehearse(tmp_path, "ddp", "--", "leave.py")
    assert code == 0, (said, found["ddp"]["checks"])
