"""Files that `accelerate config` wrote, launched both ways: what its user answered is what runs, or it is refused."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel_parallel.spec import Destination, destinations
from accel_parallel.train.pool import free_port
from tests import wizard

BIN = Path(sys.executable).parent
TIMEOUT = 180
STEPS = 3
IGNORED = "fsdp_reshard_after_forward asks for SHARD_GRAD_OP, which version 1 ignores: FULL_SHARD runs"

Launch = Callable[[Path, Path, Sequence[str]], subprocess.CompletedProcess[str]]


def accelerate_launch(file: Path, run: Path, options: Sequence[str]) -> subprocess.CompletedProcess[str]:
    arguments = ["launch", "--config_file", str(file), "--main_process_port", str(free_port())]
    arguments += ["-m", "accel_parallel.train", "--run", str(run), *options]
    return command([str(BIN / "accelerate"), *arguments], run.parent)


def our_launch(file: Path, run: Path, options: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return command([str(BIN / "accel-parallel"), "launch", str(file), "--run", str(run), *options], run.parent)


def command(arguments: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "80"}
    return subprocess.run(
        arguments, cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


both_ways = pytest.mark.parametrize("launch", [accelerate_launch, our_launch])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[wizard.Answers], Path]:
    """The file that the wizard writes for these answers; each is asked for once."""
    folder = tmp_path_factory.mktemp("wizard")
    files: dict[wizard.Answers, Path] = {}

    def write(answers: wizard.Answers) -> Path:
        if answers not in files:
            file = folder / f"{len(files)}.yaml"
            wizard.accelerate_config(file, answers)
            files[answers] = file
        return files[answers]

    return write


@pytest.fixture(scope="module")
def options(toy: list[str]) -> list[str]:
    """The toy run for the worker: without the keys that an accelerate YAML decides."""
    carried = {key for key, destination, _ in destinations() if destination is Destination.YAML}
    sets = [entry for entry in toy if entry.partition("=")[0] not in carried]
    assert len(sets) < len(toy)
    return [*(part for entry in sets for part in ("--set", entry)), "--stop-at", str(STEPS)]


@both_ways
@pytest.mark.parametrize(
    ("answers", "parallelism"), [(wizard.DDP, "ddp"), (wizard.FSDP2, "fsdp version 2")], ids=["ddp", "fsdp2"]
)
def test_trains_as_answered(
    launch: Launch,
    answers: wizard.Answers,
    parallelism: str,
    written: Callable[[wizard.Answers], Path],
    options: list[str],
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    result = launch(written(answers), run, options)
    assert result.returncode == 0, result.stderr
    environment = json.loads((run / "environment.json").read_text())
    assert environment["asked"]["parallelism"] == parallelism
    assert environment["observed"]["parallelism"] == parallelism
    assert environment["observed"]["world_size"] == 2
    units = [name for name, kind in environment["observed"]["units"].items() if kind.endswith("TransformerBlock")]
    assert len(units) == (3 if parallelism.startswith("fsdp") else 0)
    assert json.loads((run / "summary.json").read_text())["step"] == STEPS


@both_ways
def test_an_answer_that_accelerate_ignores_is_refused(
    launch: Launch, written: Callable[[wizard.Answers], Path], options: list[str], tmp_path: Path
) -> None:
    """The wizard writes SHARD_GRAD_OP under a key that Accelerate does not read in version 1, and FULL_SHARD runs."""
    result = launch(written(wizard.FSDP1_SHARD_GRAD_OP), tmp_path / "run", options)
    assert result.returncode != 0
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert IGNORED in line
    assert line.endswith("write fsdp_sharding_strategy: SHARD_GRAD_OP")
    assert not (tmp_path / "run/summary.json").exists()


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (wizard.DDP, {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"}),
        (wizard.FSDP2, {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "mixed_precision": "bf16"}),
        (
            wizard.FSDP1_SHARD_GRAD_OP,
            {"fsdp_version": 1, "fsdp_reshard_after_forward": "SHARD_GRAD_OP", "mixed_precision": "no"},
        ),
    ],
    ids=["ddp", "fsdp2", "fsdp1"],
)
def test_what_the_wizard_writes(
    answers: wizard.Answers, expected: dict[str, Any], written: Callable[[wizard.Answers], Path]
) -> None:
    content: dict[str, Any] = yaml.safe_load(written(answers).read_text())
    fsdp = content.pop("fsdp_config", {})
    assert {key: {**content, **fsdp}[key] for key in expected} == expected
    assert content["num_processes"] == 2
    assert "fsdp_sharding_strategy" not in fsdp
    assert fsdp.get("fsdp_transformer_layer_cls_to_wrap") == ("TransformerBlock" if fsdp else None)


# --- The driver itself, on small wizards: it must be able to fail, and say where ------------------------------------

MENU = """
from accelerate.commands.menu import BulletMenu
print(f"row {BulletMenu('Which colour?', ['red', 'green', 'blue']).run(default_choice=1)}")
"""
QUESTIONS = "for text in ('First? [yes/NO]: ', 'How many? [1]:'): print(f'{text} was {input(text)}')"


def talk(program: str, *answers: tuple[str, str], time_out: float = 60) -> str:
    return wizard.answer([sys.executable, "-c", program], answers, time_out=time_out, patience=0.5)


@pytest.mark.parametrize(("colour", "row"), [("red", 0), ("green", 1), ("blue", 2)])
def test_a_menu_is_answered_by_its_words(colour: str, row: int) -> None:
    assert f"row {row}" in talk(MENU, ("Which colour", colour))


def test_questions_are_answered_in_order() -> None:
    shown = talk(QUESTIONS, ("First", "no"), (r"How many\?", "7"))
    assert "First? [yes/NO]:  was no" in shown
    assert "How many? [1]: was 7" in shown


@pytest.mark.parametrize(
    ("program", "answers", "words"),
    [
        (QUESTIONS, [("How many", "7")], "the wizard asks 'First? [yes/NO]:'; the expected question is 'How many'"),
        (QUESTIONS, [("First", "no")], "the wizard asks 'How many? [1]:'; no more questions are expected"),
        (QUESTIONS, [("First", "no"), ("How many", "7"), ("Last", "x")], "the wizard ended without asking 'Last'"),
        (MENU, [("Which size", "red")], "the wizard asks 'Which colour?'; the expected question is 'Which size'"),
        (MENU, [("Which colour", "black")], "the menu 'Which colour?' has no choice 'black'"),
        ("input('Why: '); raise SystemExit('because')", [("Why", "")], "ended with exit code 1"),
    ],
    ids=["other", "new", "missing", "other menu", "lost choice", "failed"],
)
def test_the_driver_names_the_question(program: str, answers: list[tuple[str, str]], words: str) -> None:
    with pytest.raises(AssertionError) as failure:
        talk(program, *answers)
    assert words in str(failure.value)


def test_the_driver_does_not_wait_for_ever() -> None:
    with pytest.raises(AssertionError, match=r"waited 1.5 s for the question 'First'(.|\n)*thinking"):
        talk("import time; print('thinking'); time.sleep(30)", ("First", "no"), time_out=1.5)
