"""`accel-parallel config`: what it writes, what it leaves alone, what it says."""

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from accel_parallel.accelerate_yaml import loads
from accel_parallel.cli.config import write_configs
from accel_parallel.errors import RunError, SpecError
from accel_parallel.spec import RunSpec, load_spec
from accel_parallel.strategies import STRATEGIES

NAMES = [f"{name}.yaml" for name in STRATEGIES]


@pytest.fixture(autouse=True)
def _somewhere_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACCEL_PARALLEL_SPEC", raising=False)


def spec_file(text: str = "training: {batch_size: 48}\n", path: str = "mine/spec.yaml") -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_without_a_specification_the_defaults_are_written_first() -> None:
    result = write_configs()
    assert result.exit_code == 0
    assert result.lines()[0] == "written    accelerate_configs/parallelism.yaml"
    assert [file.path.name for file in result.files] == ["parallelism.yaml", *NAMES]
    assert {file.state for file in result.files} == {"written"}
    assert load_spec(Path("accelerate_configs/parallelism.yaml")) == RunSpec()


def test_a_second_run_changes_nothing() -> None:
    write_configs()
    before = {path: path.stat().st_mtime_ns for path in Path("accelerate_configs").iterdir()}
    result = write_configs()
    assert [(file.path.name, file.state) for file in result.files] == [(name, "unchanged") for name in NAMES]
    assert {path: path.stat().st_mtime_ns for path in Path("accelerate_configs").iterdir()} == before


def test_files_go_beside_the_specification_or_where_out_says() -> None:
    spec = spec_file()
    neighbour = spec.with_name("notes.txt")
    neighbour.write_text("keep me")
    write_configs(spec)
    assert {path.name for path in spec.parent.iterdir()} == {"spec.yaml", "notes.txt", *NAMES}
    assert neighbour.read_text() == "keep me"
    assert "from spec.yaml, do not edit" in spec.with_name("ddp.yaml").read_text()
    write_configs(spec, out=Path("deep/er"))
    assert {path.name for path in Path("deep/er").iterdir()} == set(NAMES)
    assert not Path("accelerate_configs").exists()


def test_only_what_changed_is_written() -> None:
    spec = spec_file()
    write_configs(spec)
    spec.write_text("fsdp: {sharding_strategy: SHARD_GRAD_OP}\n")
    states = {file.path.stem: file.state for file in write_configs(spec).files}
    assert states == {name: "written" if name == "fsdp" else "unchanged" for name in STRATEGIES}
    assert loads(spec.with_name("fsdp.yaml").read_text())["fsdp_config"]["fsdp_reshard_after_forward"] is False


def test_set_changes_the_specification_that_every_strategy_starts_from() -> None:
    write_configs(sets=["distributed.processes_per_machine=4", "distributed.mixed_precision=no"])
    folder = Path("accelerate_configs")
    assert loads((folder / "fsdp.yaml").read_text())["num_processes"] == 4
    assert loads((folder / "single.yaml").read_text()) == {
        "distributed_type": "NO",
        "num_processes": 1,
        "mixed_precision": "no",
    }
    assert load_spec(folder / "parallelism.yaml") == RunSpec()


def test_check_writes_nothing_and_shows_what_differs() -> None:
    spec = spec_file()
    write_configs(spec)
    before = {path: path.read_bytes() for path in spec.parent.iterdir()}
    assert write_configs(spec, check=True).exit_code == 0

    fsdp, ddp = spec.with_name("fsdp.yaml"), spec.with_name("ddp.yaml")
    fsdp.write_text(fsdp.read_text().replace("fsdp_version: 2", "fsdp_version: 1"))
    ddp.unlink()
    edited = fsdp.read_bytes()
    result = write_configs(spec, check=True)
    assert result.exit_code == 1
    changed = {file.path.stem: file.state for file in result.files if file.state != "unchanged"}
    assert changed == {"ddp": "missing", "fsdp": "stale"}
    lines = result.lines()
    assert any(line.startswith("-  fsdp_version: 1 ") for line in lines)
    assert any(line.startswith("+  fsdp_version: 2 ") for line in lines)
    assert any(line.startswith("+distributed_type: MULTI_GPU") for line in lines)
    assert fsdp.read_bytes() == edited
    assert not ddp.exists()
    assert {path for path in before if path.exists()} == set(before) - {ddp}


def test_check_without_any_file_creates_none() -> None:
    result = write_configs(check=True)
    assert result.exit_code == 1
    assert {file.state for file in result.files} == {"missing"}
    assert not Path("accelerate_configs").exists()


def test_a_hand_written_file_is_left_alone() -> None:
    spec = spec_file()
    mine = spec.with_name("fsdp.yaml")
    mine.write_text("distributed_type: FSDP\n")
    result = write_configs(spec)
    assert result.exit_code == 2
    assert mine.read_text() == "distributed_type: FSDP\n"
    assert [str(problem) for problem in result.problems] == [
        "mine/fsdp.yaml: was not written by accel-parallel config; left as it is (move it away, or choose --out)"
    ]
    assert spec.with_name("ddp.yaml").exists()


def test_a_strategy_that_cannot_be_rendered_does_not_stop_the_others() -> None:
    result = write_configs(spec_file("training: {batch_size: 33}\n"))
    states = {file.path.stem: file.state for file in result.files}
    assert states == {**dict.fromkeys(STRATEGIES, "skipped"), "single": "written", "ddp": "refused", "fsdp": "refused"}
    assert result.exit_code == 2
    assert [str(problem).partition(":")[0] for problem in result.problems] == ["ddp", "fsdp"]
    assert all("nearest that do: 32 or 34" in str(problem) for problem in result.problems)


def test_a_strategy_that_only_its_name_makes_impossible_is_skipped() -> None:
    """A batch of 2 divides by the 2 processes that were asked for, not by the 4 that hybrid sharding needs."""
    spec = spec_file("training: {batch_size: 2}\n")
    result = write_configs(spec)
    skipped = {file.path.stem for file in result.files if file.state == "skipped"}
    assert skipped == {"fsdp_hybrid_shard", "fsdp1_hybrid_shard"}
    assert result.exit_code == 0
    assert [problem.severity for problem in result.problems] == ["warning", "warning"]
    assert "2 does not divide by 4 processes" in str(result.problems[0])
    assert "nothing is written" in str(result.problems[0])
    assert write_configs(spec, check=True).exit_code == 0


def test_the_file_of_a_skipped_strategy_from_an_earlier_specification_is_stale() -> None:
    spec = spec_file()
    write_configs(spec)
    spec.write_text("training: {batch_size: 2}\n")
    write_configs(spec)
    assert spec.with_name("fsdp_hybrid_shard.yaml").exists()
    result = write_configs(spec, check=True)
    assert result.exit_code == 1
    assert "of an earlier specification: remove it" in str(result.problems[0])


def test_a_wrong_specification_names_everything_and_writes_nothing() -> None:
    spec = spec_file("training:\n  lr: fast\n  stepz: 3\nfdsp: {}\n")
    with pytest.raises(SpecError) as caught:
        write_configs(spec)
    assert (caught.value.exit_code, len(caught.value.problems)) == (2, 3)
    assert list(spec.parent.iterdir()) == [spec]


def test_a_folder_that_cannot_be_written_is_one_line() -> None:
    Path("file").write_text("")
    with pytest.raises(RunError) as caught:
        write_configs(spec_file(), out=Path("file/folder"))
    assert caught.value.exit_code == 2
    assert str(caught.value) == (
        "cannot write file/folder/single.yaml: Not a directory (choose another folder with --out)"
    )


def test_an_existing_file_that_is_not_text_is_one_line() -> None:
    spec = spec_file()
    spec.with_name("ddp.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunError, match="it is not UTF-8 text"):
        write_configs(spec)


def test_a_reader_never_sees_half_a_file() -> None:
    """The new text is complete under another name before it takes the file's name."""
    spec = spec_file()
    seen: list[tuple[str, str]] = []
    replace = Path.replace

    def watch(self: Path, target: Path) -> Path:
        seen.append((Path(target).name, self.read_text()))
        assert self.parent == Path(target).parent
        return replace(self, target)

    with patch.object(Path, "replace", watch):
        write_configs(spec)
    assert [name for name, _ in seen] == NAMES
    assert all(text == spec.with_name(name).read_text() for name, text in seen)


def test_environment_variable_names_the_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_PARALLEL_SPEC", str(spec_file()))
    assert {file.path.parent for file in write_configs().files} == {Path("mine")}


def test_data_of_the_json_object() -> None:
    spec = spec_file("training: {batch_size: 33}\n")
    printed = json.loads(json.dumps(write_configs(spec).to_dict()))
    assert printed["spec"] == os.fspath(spec)
    assert printed["files"][0] == {"path": "mine/single.yaml", "state": "written", "diff": ""}
