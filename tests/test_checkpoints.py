"""What a run has saved: complete or damaged and how, what may change when it goes on, and the verb that shows both."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_parallel.checkpoints import (
    Manifest,
    complete_checkpoints,
    list_checkpoints,
    newest_checkpoint,
    newest_step,
    wrong_digest,
)
from accel_parallel.cli import main
from accel_parallel.continuing import Effect, changes, effect_of
from accel_parallel.runs import open_run
from accel_parallel.spec import RunSpec, load_spec
from tests.saved import checkpoint, forge

RUN = Path("run")
SHA = "0" * 64


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACCEL_PARALLEL_SPEC", raising=False)


def verb(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["checkpoints", *arguments])
    captured = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, captured.out, captured.err


# --- Damage -----------------------------------------------------------------------------------------------------------


def text(content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "manifest.json").write_text(content) and None


def forged(**changes: object) -> Callable[[Path], None]:
    return lambda folder: forge(folder, changes)


def edited(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"tokens": 2560', '"tokens": 2561'))


def linked_out(folder: Path) -> None:
    Path("outside").write_text("abc")
    (folder / "shard").unlink()
    (folder / "shard").symlink_to(Path("outside").absolute())


def moved_and_linked(folder: Path) -> None:
    folder.rename("elsewhere")
    folder.symlink_to(Path("elsewhere").absolute())


def pipe(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("empty", text(""), "manifest.json is empty or damaged"),
    ("cut off", text('{"format": 2,'), "manifest.json is empty or damaged"),
    ("nested", text("[" * 100_000), "manifest.json is empty or damaged"),
    ("bytes", lambda folder: (folder / "manifest.json").write_bytes(b"\xff\x00"), "manifest.json is empty or damaged"),
    ("huge number", text('{"format": ' + "9" * 5000 + "}"), "manifest.json is empty or damaged"),
    ("a list", text("[]"), "manifest.json is not one of this program"),
    ("another program's", text('{"version": 1}'), "manifest.json is not one of this program"),
    ("older", text('{"format": 1}'), "manifest.json has format 1, this version reads 2"),
    ("newer", forged(format=3), "manifest.json has format 3, this version reads 2"),
    ("edited", edited, "manifest.json was changed after it was written"),
    ("gone", lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
    ("a pipe", pipe, "manifest.json is not a regular file"),
    ("of another step", forged(state={"step": 9, "samples": 1, "tokens": 1}), "manifest.json is of step 9"),
    ("no state", forged(state=None), "manifest.json is damaged: state: Field required"),
    ("a negative step", forged(state={"step": -1, "samples": 1, "tokens": 1}), "manifest.json is damaged: state.step"),
    ("more state", forged(state={"step": 10, "samples": 1, "tokens": 1, "x": 1}), "manifest.json is damaged: state.x"),
    ("no files", forged(files={}), "manifest.json is damaged: files"),
    ("a path", forged(files={"../shard": {"bytes": 3, "sha256": SHA}}), "manifest.json is damaged: files.../shard"),
    ("the folder above", forged(files={"..": {"bytes": 3, "sha256": SHA}}), ".. is not a regular file"),
    ("a zero byte", forged(files={"a\0b": {"bytes": 3, "sha256": SHA}}), "manifest.json is damaged: files.a"),
    ("file gone", lambda folder: (folder / "shard").unlink(), "shard is missing"),
    ("file cut off", lambda folder: (folder / "shard").write_text("ab"), "shard has 2 of 3 bytes"),
    ("file longer", lambda folder: (folder / "shard").write_text("abcd"), "shard has 4 of 3 bytes"),
    ("file linked", linked_out, "shard is not a regular file"),
    ("folder linked", moved_and_linked, "is not a directory"),
]


@pytest.mark.parametrize(("damage", "says"), [case[1:] for case in DAMAGES], ids=[case[0] for case in DAMAGES])
def test_damage_is_named_and_the_one_before_is_newest(damage: Callable[[Path], object], says: str) -> None:
    older, newer = checkpoint(RUN, 5), checkpoint(RUN, 10)
    damage(newer)
    assert complete_checkpoints(RUN) == {5: older}
    assert (newest_checkpoint(RUN), newest_step(RUN)) == (older, 5)
    found = list_checkpoints(RUN)[-1]
    assert (found.path, found.step, found.manifest) == (newer, 10, None)
    assert found.damage is not None
    assert found.damage.startswith(says)
    assert found.damage.isprintable()


def test_only_what_is_named_like_a_checkpoint_is_one() -> None:
    whole = checkpoint(RUN, 123_456_789)
    for name in ("step-20", ".partial-step-00000015", ".removed-step-00000004", "step-0000001x", "other"):
        (RUN / "checkpoints" / name).mkdir()
    assert [found.path for found in list_checkpoints(RUN)] == [whole]
    assert list_checkpoints(Path("none")) == []
    assert (newest_checkpoint(Path("none")), newest_step(Path("none"))) == (None, 0)


def test_digests_see_what_sizes_do_not() -> None:
    folder = checkpoint(RUN, 5)
    (found,) = list_checkpoints(RUN)
    assert wrong_digest(found) is None
    (folder / "shard").write_text("abd")
    assert list_checkpoints(RUN)[0].damage is None
    assert wrong_digest(found) == "shard is not what was written: its digest differs"
    assert wrong_digest(found, []) is None
    (folder / "shard").unlink()
    assert wrong_digest(found) == "shard cannot be read: No such file or directory"


def test_a_manifest_comes_back_equal() -> None:
    folder = checkpoint(RUN, 5)
    manifest = Manifest.loads((folder / "manifest.json").read_text())
    assert manifest.dumps() == (folder / "manifest.json").read_text()
    assert manifest.flat_spec == RunSpec().flat()


# --- What may change --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "effect"),
    [
        (["model.hidden_dim=640"], Effect.WEIGHTS),
        (["model.rope_theta=500000"], Effect.WEIGHTS),
        (["model.tie_embeddings=false"], Effect.WEIGHTS),
        (["model.seq_len=64"], Effect.ORDER),
        (["training.seed=3"], Effect.ORDER),
        (["data.max_tokens=1000"], Effect.TOKENS),
        (["training.lr=5e-4"], Effect.NUMBERS),
        (["training.batch_size=16"], Effect.NUMBERS),
        (["distributed.mixed_precision=no"], Effect.NUMBERS),
        (["training.grad_accum_steps=2"], Effect.LAYOUT),
        (["model.activation_checkpointing=block"], Effect.LAYOUT),
        (["distributed.processes_per_machine=4"], Effect.LAYOUT),
        (["fsdp.cpu_offload=true"], Effect.LAYOUT),
        (["checkpoint.keep=9"], Effect.NONE),
        (["logging.every=1"], Effect.NONE),
        (["ddp.static_graph=true"], Effect.NONE),
    ],
)
def test_what_another_value_does(sets: list[str], effect: Effect) -> None:
    (change,) = changes(RunSpec().flat(), load_spec(None, sets))
    assert (change.key, change.effect) == (sets[0].split("=")[0], effect)


def test_every_key_of_the_model_is_decided_one_by_one_or_refused() -> None:
    free = {key for key in RunSpec().flat() if key.startswith("model.") and not effect_of(key).refused}
    assert free == {"model.preset", "model.init_from", "model.activation_checkpointing", "model.loss"}


def test_keys_that_only_one_version_knows_are_no_changes() -> None:
    before = {key: value for key, value in RunSpec().flat().items() if key != "model.loss"}
    assert changes({**before, "model.gone": 1}, load_spec(None, ["model.loss=full"])) == []


# --- The verb ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run() -> Path:
    spec = load_spec(None, ["distributed.processes_per_machine=4"])
    path = open_run(spec, "ddp", explicit=Path("runs/ddp-001")).path
    checkpoint(path, 20, spec=spec, strategy="ddp", age=3 * 3600 + 60)
    checkpoint(path, 40, spec=spec, strategy="ddp", age=130)
    return path


def test_checkpoints_are_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint(run, 60) / "shard").unlink()
    code, out, err = verb(capsys, str(run))
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["step", "strategy", "processes", "size", "age", "state"]
    assert rows[1] == ["20", "ddp", "4", "3", "B", "3", "h", "complete"]
    assert rows[2] == ["40", "ddp", "4", "3", "B", "2", "min", "complete"]
    assert out.splitlines()[3] == "       60  damaged: shard is missing"
    assert max(map(len, out.splitlines())) <= 80


def test_verify_reads_every_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb(capsys, str(run), "--verify")[0] == 0
    (run / "checkpoints/step-00000020/shard").write_text("abd")
    assert verb(capsys, str(run))[0] == 0
    code, out, err = verb(capsys, str(run), "--verify", "--json")
    assert code == 1
    assert err.splitlines() == ["reading step-00000020, 3 B", "reading step-00000040, 3 B"]
    listed = json.loads(out)["data"]["checkpoints"]
    assert [(each["step"], each["state"]) for each in listed] == [(20, "damaged"), (40, "complete")]
    assert listed[0]["damage"] == "shard is not what was written: its digest differs"
    assert listed[1]["world_size"] == 4
    assert max(map(len, verb(capsys, str(run), "--verify")[1].splitlines())) <= 80


def test_a_run_without_checkpoints_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    open_run(RunSpec(), "fsdp", explicit=RUN)
    assert verb(capsys, "run") == (0, "run has no checkpoints\n", "")
    code, _, err = verb(capsys, "run", "--for", "fsdp")
    assert code == 2
    assert err.startswith("error: run has no complete checkpoint")


def test_what_is_no_run_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = verb(capsys, "runs/ddp-01")
    assert (code, out) == (2, "")
    assert err == ("error: runs/ddp-01 is not a run directory; did you mean 'runs/ddp-001'? (there are runs/ddp-001)\n")
    for option in (["--set", "training.lr=1"], ["--num-processes", "2"], ["--spec", "x.yaml"]):
        code, _, err = verb(capsys, str(run), *option)
        assert code == 2
        assert "belong to --for" in err


def test_for_says_what_changes_and_how_to_launch(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = verb(capsys, str(run), "--for", "fsdp", "--set", "training.lr=5e-4", "--num-processes", "2")
    assert code == 0
    assert out.splitlines() == [
        "runs/ddp-001/checkpoints/step-00000040: ddp, 4 processes",
        "loads under fsdp, 2 processes",
        "  goes on with the new value:",
        "    training.lr 0.001 -> 0.0005",
        "  the same numbers, spread or computed differently:",
        "    distributed.processes_per_machine 4 -> 2",
        "",
        "40 steps are left",
        "accel-parallel launch fsdp --run runs/ddp-001 --num-processes 2 --set training.lr=5e-4",
    ]


def test_for_refuses_another_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = verb(capsys, str(run), "--for", "single", "--set", "model.hidden_dim=640", "--json")
    data = json.loads(out)["data"]
    assert (code, data["loads"], data["command"]) == (1, False, None)
    (refused,) = [change for change in data["changes"] if change["effect"] == "weights"]
    assert refused == {"key": "model.hidden_dim", "before": 320, "now": 640, "effect": "weights"}
    assert (
        "does not load under single, 1 process"
        in verb(capsys, str(run), "--for", "single", "--set", "model.hidden_dim=640")[1]
    )


def test_for_agrees_with_the_launch(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the one refuses or allows, the other does."""
    for entry, loads in (("model.ffn_dim=64", False), ("training.seed=2", False), ("training.weight_decay=0.3", True)):
        assert verb(capsys, str(run), "--for", "ddp", "--set", entry)[0] == (0 if loads else 1)
        with pytest.raises(SystemExit) as end:
            # Asked for more processes than can share the directory's lock file: none starts.
            main(["launch", "ddp", "--run", str(run), "--set", entry, "--set", "training.steps=40"])
        assert end.value.code == (0 if loads else 2), capsys.readouterr().err
        capsys.readouterr()


def test_for_a_strategy_that_cannot_be_launched(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = verb(capsys, str(run), "--for", "fsdpp")
    assert code == 2
    assert "did you mean 'fsdp'" in err
    code, _, err = verb(capsys, str(run), "--for", "ddp", "--num-processes", "3")
    assert code == 2
    assert "batch_size 32 does not divide" in err
