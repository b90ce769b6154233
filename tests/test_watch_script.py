"""Scripts as people write them, unmodified, under --observe: what is seen against what can be computed by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.workers import launcher_environment, run_processes

SCRIPTS = Path(__file__).parent / "scripts"
DDP = "distributed_type: MULTI_GPU\nnum_processes: 2\n"
FSDP = (
    "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {{fsdp_version: {version}, "
    "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_transformer_layer_cls_to_wrap: {cls}, {more}}}\n"
)


def _run(argv: list[str], log: str) -> int:
    import os
    import sys

    import torch

    from accel_parallel.train.runtime import cpu
    from accel_parallel.train.script import main

    cpu.use_all_cores = lambda *_: torch.set_num_threads(1)
    with Path(f"{log}-{os.environ['RANK']}.txt").open("w") as sys.stdout:
        sys.stderr = sys.stdout
        return main([*argv[:-1], *argv[-1].split()])


# Class to wrap, arguments, elements of the models that are trained, backward passes of a step that DDP reduces.
CASES = {
    "manual_accumulation": ("Block", "", [8738], 2),
    "gather_metrics": ("Block", "", [4290], 1),
    "several_prepares": ("Block", "", [2640, 5378], 1),
    "save_and_load": ("Block", "--folder {folder}/state", [2404], 1),
    "llama": ("LlamaDecoderLayer", "", [21664], 1),
}


def observe(
    name: str, config: str, folder: Path, words: str = "", *options: str, code: int = 0
) -> list[dict[str, Any]]:
    argv = [*options, "--observe", str(folder / "seen"), f"{SCRIPTS}/{name}.py {words.format(folder=folder)}"]
    results = run_processes(_run, launcher_environment(config), 2, argv, str(folder / "log"))
    assert results == [("ok", code)] * 2, (folder / "log-0.txt").read_text()
    return [json.loads((folder / f"seen/rank-{rank:02d}.json").read_text()) for rank in (0, 1)]


def least(rank: dict[str, Any]) -> dict[str, int]:
    """Bytes by kind in the window that holds least."""
    windows = [{item["kind"]: item["tensor_bytes"] for item in w["collectives"]} for w in rank["windows"]]
    return min(windows, key=lambda window: sum(window.values()))


@pytest.mark.parametrize("name", CASES)
def test_replicas_hold_and_reduce_everything(name: str, tmp_path: Path) -> None:
    _, words, sizes, passes = CASES[name]
    for rank in observe(name, DDP, tmp_path, words):
        assert rank["ended"] == "done"
        trained = [model for model in rank["models"] if model["trainable_elements"]]
        assert [model["parallelism"] for model in trained] == ["ddp"] * len(sizes)
        assert [model["held_bytes"] for model in trained] == [4 * size for size in sizes]
        assert sorted(item["gradient_bytes"] for item in rank["optimizers"]) == sorted(4 * size for size in sizes)
        reduced = least(rank)["all_reduce"]
        # Of several_prepares: the critic is reduced twice, for the generator too, and a loss.
        extra = 4 * sizes[1] + 4 if name == "several_prepares" else 0
        assert reduced == passes * sum(4 * size for size in sizes) + extra


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_shards_are_halves(name: str, version: int, tmp_path: Path) -> None:
    cls, words, sizes, _ = CASES[name]
    # Sharded: a full optimizer state of version 1 is not what was saved after it is loaded on CPU processes.
    more = "fsdp_state_dict_type: SHARDED_STATE_DICT"
    for rank in observe(name, FSDP.format(version=version, cls=cls, more=more), tmp_path, words):
        trained = [model for model in rank["models"] if model["trainable_elements"]]
        assert [model["parallelism"] for model in trained] == [f"fsdp version {version}"] * len(sizes)
        assert [model["held_bytes"] for model in trained] == [2 * size for size in sizes]
        assert sorted(item["gradient_bytes"] for item in rank["optimizers"]) == sorted(2 * size for size in sizes)
        for model in trained:
            assert list(model["units"].values()).count(cls) == model["class_counts"][cls]
            assert model["tied_before"] == model["tied_after"]
            assert model["resharded_after_forward"] is True
            assert model["compute_dtypes"] == ["float32"]


def test_a_script_that_brings_fsdp_is_refused_or_allowed(tmp_path: Path) -> None:
    (tmp_path / "no").mkdir()
    for rank in observe("own_plugin", DDP, tmp_path / "no", "", code=2):
        assert "--fsdp-in-script" in rank["ended"]
        assert rank["models"] == []
    for version in (1, 2):
        folder = tmp_path / str(version)
        folder.mkdir()
        for rank in observe("own_plugin", DDP, folder, f"--version {version} --offload", "--fsdp-in-script"):
            (model,) = rank["models"]
            assert (model["parallelism"], model["own_plugin"]) == (f"fsdp version {version}", True)
            assert model["held_bytes"] == 2 * (16 * 64 + 64 + 64 * 2 + 2)
            assert [w["backward_passes"] for w in rank["windows"]] == [3, 3]
            assert least(rank)["reduce_scatter"] == model["whole_bytes"]
            keys = [item["key"] for item in rank["substitutions"]]
            assert "fsdp_offload_params" in keys
            assert ("fsdp_sync_module_states" in keys) is (version == 1)
