"""No dead keys of our own: every key of the specification, changed, changes something that can be seen.

Keys that the YAML carries are perturbed in test_accelerate_yaml.py, against what Accelerate builds from them.
"""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_parallel.asked import Asked
from accel_parallel.spec import Destination, RunSpec, destinations, load_spec
from accel_parallel.train.runtime.arguments import (
    accelerator_arguments,
    model_flops_utilisation,
    process_group_options,
)
from tests.workers import Trained, train

ROOT = Path(__file__).parent.parent

# Another valid value for each key that only the training loop reads.
CHANGES: dict[str, list[str]] = {
    "model.preset": ["model.preset=124m", "model.num_layers=null"],
    "model.vocab_size": ["model.vocab_size=300"],
    "model.num_layers": ["model.num_layers=2"],
    "model.num_heads": ["model.num_heads=2"],
    "model.num_kv_heads": ["model.num_kv_heads=1"],
    "model.hidden_dim": ["model.hidden_dim=48"],
    "model.ffn_dim": ["model.ffn_dim=96"],
    "model.seq_len": ["model.seq_len=16"],
    "model.rope_theta": ["model.rope_theta=500"],
    "model.norm_eps": ["model.norm_eps=0.1"],
    "model.tie_embeddings": ["model.tie_embeddings=false"],
    "model.init_from": ["model.init_from={llama}"],
    "data.tokenizer": ["data.tokenizer={tokenizer}"],
    "data.max_tokens": ["data.max_tokens=2500"],
    "data.val_fraction": ["data.val_fraction=0.3"],
    "data.document_boundaries": ["data.document_boundaries=false"],
    "data.recipe": ["data.recipe=python_stdlib", "data.max_tokens=3000"],
    "training.batch_size": ["training.batch_size=4"],
    "training.grad_accum_steps": ["training.grad_accum_steps=4"],
    "training.steps": ["training.steps=5"],
    "training.lr": ["training.lr=2e-3"],
    "training.min_lr": ["training.min_lr=2e-4"],
    "training.warmup_steps": ["training.warmup_steps=1"],
    "training.weight_decay": ["training.weight_decay=0.9"],
    "training.betas": ["training.betas=[0.8, 0.95]"],
    "training.max_grad_norm": ["training.max_grad_norm=0.01"],
    "training.seed": ["training.seed=7"],
    "training.deterministic": ["training.deterministic=true"],
    "checkpoint.every": ["checkpoint.every=2"],
    "checkpoint.keep": ["checkpoint.keep=1"],
    "logging.every": ["logging.every=3"],
    "logging.eval_every": ["logging.eval_every=2"],
    "logging.eval_batches": ["logging.eval_batches=1"],
    "logging.trackers": ["logging.trackers=[tensorboard]"],
}
# Their effect is not on what is learned; the test named here sees it.
SEEN_ELSEWHERE = {
    "model.activation_checkpointing": ("tests/test_model.py", "checkpointing"),
    "model.loss": ("tests/test_model.py", "chunked"),
    "data.text_column": ("tests/test_data_sources.py", "text_column"),
    "checkpoint.async": ("tests/test_portable.py", "in_the_background"),
    "checkpoint.verify": ("tests/test_damage.py", "without_verification"),
    "hardware.accelerator": ("tests/test_effects.py", "hardware_accelerator"),
}
BASE = ["training.steps=6", "training.max_grad_norm=0.5", "checkpoint.every=3", "checkpoint.keep=2"]


def trace(result: Trained) -> dict[str, Any]:
    """Everything a run leaves behind that does not depend on the clock."""
    assert result.exit_codes == [0], (result.errors, result.log)
    measured = {"time", "tokens_per_sec", "step_seconds", "peak_memory_gib", "seconds", "stood_still", "bytes"}
    rows = {kind: result.rows(kind) for kind in ("train", "eval", "save")}
    return {
        "rows": [
            (kind, {key: value for key, value in row.items() if key not in measured})
            for kind, steps in rows.items()
            for row in steps.values()
        ],
        "checkpoints": sorted(path.name for path in (result.run / "checkpoints").iterdir()),
        "folders": sorted(path.name for path in result.run.iterdir()),
        "data": result.environment["data"],
        "torch": result.environment["torch"],
    }


@pytest.fixture(scope="module")
def base(toy: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trace(train(tmp_path_factory.mktemp("base") / "run", "single", 1, [*toy, *BASE]))


@pytest.fixture(scope="module")
def tokenizer(toy: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that AutoTokenizer reads: the one trained for a smaller vocabulary."""
    from accel_parallel.train.data import prepare

    return prepare(load_spec(None, toy).data, 290).tokenizer_folder


def test_the_same_specification_leaves_the_same_trace(base: dict[str, Any], toy: list[str], tmp_path: Path) -> None:
    assert trace(train(tmp_path / "run", "single", 1, [*toy, *BASE])) == base


@pytest.fixture(scope="module")
def llama(toy: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with other weights for the toy's shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from accel_parallel.llama import llama_config

    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**llama_config(load_spec(None, toy).model, 0, "float32"))).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("key", CHANGES)
def test_a_key_of_the_loop_changes_the_run(
    key: str, base: dict[str, Any], toy: list[str], tokenizer: Path, llama: Path, tmp_path: Path
) -> None:
    change = [entry.format(tokenizer=tokenizer, llama=llama) for entry in CHANGES[key]]
    if key == "model.preset":
        # The toy names every dimension; left out, they follow the preset.
        spec = load_spec(None, [*toy, "model.preset=null"])
        assert load_spec(None, ["model.preset=124m"]).model.shape != load_spec().model.shape
        assert spec.model.preset is None
        return
    assert trace(train(tmp_path / "run", "single", 1, [*toy, *BASE, *change])) != base


ASKED = Asked.from_environment({"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"})
ARGUMENTS = {
    "distributed.backend": "gloo",
    "distributed.timeout_minutes": "5",
    "ddp.bucket_cap_mb": "50",
    "ddp.gradient_as_bucket_view": "false",
    "ddp.static_graph": "true",
    "fsdp.sync_each_batch": "false",
}


@pytest.mark.parametrize("key", ARGUMENTS)
def test_a_key_for_accelerate_changes_its_arguments(key: str) -> None:
    assert arguments(load_spec(None, [f"{key}={ARGUMENTS[key]}"])) != arguments(RunSpec())


def arguments(spec: RunSpec) -> dict[str, Any]:
    made = accelerator_arguments(spec, ASKED)
    handlers = [dataclasses.asdict(handler) for handler in made["kwargs_handlers"]]
    plugin = dataclasses.asdict(made["gradient_accumulation_plugin"])
    return {
        "handlers": [{key: str(value) for key, value in handler.items()} for handler in handlers],
        "accumulation": plugin,
        "group": process_group_options(spec, ASKED, device_type="cuda"),
    }


def test_hardware_accelerator_is_what_mfu_relates_to() -> None:
    h200 = model_flops_utilisation(RunSpec(), 1e6, 2)
    a100 = model_flops_utilisation(load_spec(None, ["hardware.accelerator=a100_80gb"]), 1e6, 2)
    assert a100 / h200 == pytest.approx(989 / 312, rel=1e-3)


def test_every_key_is_covered() -> None:
    by_destination: dict[Destination, set[str]] = {destination: set() for destination in Destination}
    for key, destination, _ in destinations():
        by_destination[destination].add(key)
    assert by_destination[Destination.OURS] == set(CHANGES) | set(SEEN_ELSEWHERE)
    assert by_destination[Destination.ACCELERATOR] == set(ARGUMENTS)


@pytest.mark.parametrize("key", SEEN_ELSEWHERE)
def test_the_tests_named_elsewhere_exist(key: str) -> None:
    path, word = SEEN_ELSEWHERE[key]
    source = (ROOT / path).read_text()
    assert any(word in line for line in source.splitlines() if line.startswith("def test_")), (path, word)


def test_the_published_table_is_the_code() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "docs/generate.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout
