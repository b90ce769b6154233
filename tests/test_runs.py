"""Run directories, metrics lines and the closing summary."""

import json
import threading
from pathlib import Path

import pytest

from accel_parallel.errors import RunError
from accel_parallel.files import write_atomic
from accel_parallel.metrics import by_step, mfu, read_lines, to_line
from accel_parallel.runs import discard_partial_checkpoints, open_run
from accel_parallel.spec import RunSpec, load_spec, read_spec
from accel_parallel.summary import render_summary

SPEC = RunSpec()
OTHER = load_spec(None, ["training.lr=5e-4"])


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_newest_run_with_an_equal_specification_is_continued() -> None:
    first = open_run(SPEC, "fsdp")
    assert (first.path, first.continues) == (Path("runs/fsdp-001"), False)
    again = open_run(SPEC, "fsdp")
    assert (again.path, again.continues) == (first.path, True)
    assert open_run(SPEC, "ddp").path == Path("runs/ddp-001")


def test_another_specification_takes_the_next_number_and_says_why() -> None:
    open_run(SPEC, "fsdp")
    other = open_run(OTHER, "fsdp")
    assert (other.path, other.continues) == (Path("runs/fsdp-002"), False)
    assert other.note is not None
    assert "training.lr 0.001 -> 0.0005" in other.note
    back = open_run(SPEC, "fsdp")
    assert (back.path, back.continues) == (Path("runs/fsdp-001"), True)
    assert load_spec(Path("runs/fsdp-002/spec.yaml")) == OTHER


def test_fresh_takes_the_next_number() -> None:
    open_run(SPEC, "fsdp")
    fresh = open_run(SPEC, "fsdp", fresh=True)
    assert (fresh.path, fresh.continues, fresh.note) == (Path("runs/fsdp-002"), False, None)
    assert open_run(SPEC, "fsdp").path == Path("runs/fsdp-002")


def test_what_does_not_decide_the_numbers_may_change() -> None:
    open_run(SPEC, "fsdp")
    changed = load_spec(None, ["logging.every=1", "fsdp.min_num_params=2M", "distributed.processes_per_machine=4"])
    assert open_run(changed, "fsdp").continues


def test_names_of_one_strategy_do_not_match_another() -> None:
    open_run(SPEC, "fsdp_cpu_offload")
    assert open_run(SPEC, "fsdp").path == Path("runs/fsdp-001")
    for number in (998, 999, 1000):
        Path(f"runs/ddp-{number}").mkdir(parents=True)
    assert open_run(SPEC, "ddp", fresh=True).path == Path("runs/ddp-1001")


def test_a_named_directory_continues_under_any_strategy() -> None:
    open_run(SPEC, "ddp", explicit=Path("mine"))
    assert open_run(SPEC, "fsdp", explicit=Path("mine")).continues
    assert open_run(OTHER, "fsdp", explicit=Path("mine")).told_changes == ["training.lr 0.001 -> 0.0005"]
    wider = load_spec(None, ["model.hidden_dim=640"])
    with pytest.raises(
        RunError, match=r"mine cannot go on with model.hidden_dim 320 -> 640: the weights would not fit"
    ):
        open_run(wider, "fsdp", explicit=Path("mine"))
    assert load_spec(Path("mine/spec.yaml")) == OTHER, "left as it was"
    with pytest.raises(RunError, match="nothing is overwritten"):
        open_run(SPEC, "fsdp", explicit=Path("mine"), fresh=True)


def test_an_unreadable_specification_is_never_taken_over() -> None:
    run = open_run(SPEC, "fsdp")
    (run.path / "spec.yaml").write_text("training: [\n")
    assert open_run(SPEC, "fsdp").path == Path("runs/fsdp-002")
    with pytest.raises(RunError, match=r"its spec.yaml cannot be read"):
        open_run(SPEC, "fsdp", explicit=run.path)


def test_two_launches_at_once_get_a_directory_each() -> None:
    taken: list[Path] = []
    barrier = threading.Barrier(8)

    def one() -> None:
        barrier.wait()
        taken.append(open_run(SPEC, "fsdp", fresh=True).path)

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(taken)) == 8


def test_only_what_a_save_left_half_written_is_removed() -> None:
    run = open_run(SPEC, "fsdp")
    names = ["step-00000005", ".partial-step-00000015", ".removed-step-00000004", ".damaged-step-00000003-ab", ".other"]
    for name in names:
        (run.checkpoints / name).mkdir(parents=True)
        (run.checkpoints / name / "shard").write_text("ab")
    discard_partial_checkpoints(run.path)
    left = sorted(path.name for path in run.checkpoints.iterdir())
    assert left == [".damaged-step-00000003-ab", ".other", "step-00000005"]
    discard_partial_checkpoints(Path("gone"))


def test_a_file_with_the_name_of_a_run_is_left_alone() -> None:
    open_run(SPEC, "fsdp")
    Path("runs/fsdp-002").write_text("mine")
    for fresh in (False, True):
        assert open_run(OTHER, "fsdp", fresh=fresh).path == Path(f"runs/fsdp-00{4 if fresh else 3}")
    assert Path("runs/fsdp-002").read_text() == "mine"


def test_a_run_may_be_named_after_any_file() -> None:
    """`launch 'my[1].yaml'` has runs of that name."""
    first = open_run(SPEC, "my[1]")
    assert (first.path, first.metrics) == (Path("runs/my[1]-001"), Path("runs/my[1]-001/metrics.jsonl"))
    assert open_run(SPEC, "my[1]").continues


def test_a_text_is_replaced_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("file.txt")
    write_atomic(path, "old")

    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [found.name for found in Path().iterdir()] == ["file.txt"]


# --- Lines ------------------------------------------------------------------------------------------------------------


def test_lines_hold_no_nan() -> None:
    line = to_line("train", {"step": 3, "loss": float("nan"), "grad_norm": float("inf"), "lr": 0.1})
    assert json.loads(line) == {"kind": "train", "step": 3, "loss": None, "grad_norm": None, "lr": 0.1}


def test_after_a_replay_the_last_line_of_a_step_wins() -> None:
    rows = [{"kind": "train", "step": step, "loss": loss} for step, loss in ((1, 9.0), (2, 8.0), (3, 7.0), (2, 8.5))]
    latest = by_step([*rows, {"kind": "eval", "step": 2, "loss": 1.0}], "train")
    assert [(step, row["loss"]) for step, row in latest.items()] == [(1, 9.0), (2, 8.5), (3, 7.0)]


def test_a_line_cut_off_by_a_kill_is_left_out() -> None:
    path = Path("metrics.jsonl")
    path.write_text('{"kind": "train", "step": 1}\n3\n{"step": 2}\n{"kind": "train", "st')
    assert read_lines(path) == [{"kind": "train", "step": 1}]
    assert read_lines(Path("none.jsonl")) == []


def test_mfu_of_a_published_run() -> None:
    """torchtitan, Llama 3.1 8B, 8 H100: 5,762 tokens/s per GPU are 33.7 % by 6N + 12 L H Q T at 989 TFLOP/s."""
    spec = load_spec(None, ["model.preset=llama3_8b"])
    flops = spec.model.shape.flops_per_token()
    # Ours leaves out the norms, which take no part in matrix products.
    assert flops == pytest.approx(6 * 7_504_924_672 + 12 * 32 * 32 * 128 * 8192, rel=1e-4)
    assert mfu(8 * 5_762, flops, 989, 8) == pytest.approx(0.337, abs=5e-4)


def test_summary_fits_80_columns_and_says_which_is_better() -> None:
    summary = {
        "run": "runs/a-rather-long-name-for-a-run-directory/fsdp-001", "strategy": "fsdp", "world_size": 16,
        "device": "cpu", "step": 80, "steps": 100, "tokens": 327_680, "first_train_loss": 7.5,
        "last_train_loss": None, "val_loss": 5.0, "unigram_entropy": 5.5, "val_tokens": 1000, "tokens_per_sec": 1234.5,
        "peak_memory_gib": [1.0] * 16, "checkpoint": "runs/x/checkpoints/step-00000080",
        "prompt": "def f(", "sample": "x" * 200 + "\x1b[2J\x07\n\n    return\n",
    }  # fmt: skip
    text = render_summary(summary)
    assert max(map(len, text.splitlines())) <= 80
    assert "80 of 100, 327,680 tokens; the same command," in text
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "the model is 0.50 nat better" in text
    assert "1,234 tokens/s" in text
    assert "0.50 nat worse" in render_summary({**summary, "val_loss": 6.0})


def test_a_changed_layout_is_said_and_not_refused() -> None:
    first = open_run(SPEC, "fsdp")
    assert first.changes == ()
    again = open_run(SPEC, "fsdp")
    assert (again.path, again.changes) == (first.path, ())
    other = read_spec().resolve({"fsdp.version": 1, "distributed.processes_per_machine": 4})
    changed = open_run(other, "fsdp")
    assert changed.path == first.path
    assert changed.told_changes == [
        "distributed.processes_per_machine 2 -> 4",
        "fsdp.version 2 -> 1",
        "fsdp.wrap block -> size",
    ]
    assert open_run(other, "fsdp").changes == ()
