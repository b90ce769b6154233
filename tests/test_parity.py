"""The promise of the project: the strategy does not change what is learned. Real processes, float32, CPU."""

from pathlib import Path

import pytest

from accel_parallel.train.data import sample_ids
from tests.workers import Trained, train

LAYOUTS = [("ddp", 2), ("fsdp", 2), ("fsdp", 4)]
VARIANTS = {
    "tied": [],
    "untied": ["model.tie_embeddings=false"],
    "tied, accumulating": ["training.grad_accum_steps=2"],
    "untied, accumulating": ["model.tie_embeddings=false", "training.grad_accum_steps=2"],
    "accumulating without reducing each micro-batch": ["training.grad_accum_steps=2", "fsdp.sync_each_batch=false"],
}
LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-3


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> list[str]:
    return VARIANTS[request.param]


@pytest.fixture(scope="module")
def reference(variant: list[str], toy: list[str], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    result = train(tmp_path_factory.mktemp("single") / "run", "single", 1, [*toy, *variant])
    assert result.exit_codes == [0], result.errors
    return result


@pytest.mark.parametrize(("strategy", "world_size"), LAYOUTS, ids=[f"{name}-{size}" for name, size in LAYOUTS])
def test_learns_what_one_process_learns(
    strategy: str, world_size: int, variant: list[str], reference: Trained, toy: list[str], tmp_path: Path
) -> None:
    result = train(tmp_path / "run", strategy, world_size, [*toy, *variant])
    assert result.exit_codes == [0] * world_size, result.errors
    assert len(result.column("loss")) == 20
    assert result.column("loss") == pytest.approx(reference.column("loss"), rel=LOSS_TOLERANCE)
    assert result.column("grad_norm") == pytest.approx(reference.column("grad_norm"), rel=NORM_TOLERANCE)
    assert result.column("loss", "eval") == pytest.approx(reference.column("loss", "eval"), rel=LOSS_TOLERANCE)
    assert result.column("loss")[-1] < 0.95 * result.column("loss")[0]
    observed = result.environment["observed"]
    assert observed["parallelism"].startswith(strategy)
    assert observed["world_size"] == world_size
    assert not result.environment["overruled"]
    if strategy == "fsdp":
        assert [name for name, kind in observed["units"].items() if kind == "TransformerBlock"] == [
            "blocks.0", "blocks.1", "blocks.2",
        ]  # fmt: skip


V1 = ["fsdp.version=1", "fsdp.wrap=block"]
OTHER_SHARDINGS = {
    "keeps parameters after the forward pass": ["fsdp.sharding_strategy=SHARD_GRAD_OP"],
    "offloaded": ["fsdp.cpu_offload=true"],
    "every process fills its weights": ["fsdp.cpu_ram_efficient_loading=false"],
    "one unit": ["fsdp.wrap=none"],
    "checkpointing blocks": ["model.activation_checkpointing=block"],
    "version 1": V1,
    "version 1, wrapped by size": [
        "fsdp.version=1",
        "fsdp.wrap=size",
        "fsdp.min_num_params=9000",
        "model.vocab_size=257",
    ],
    "version 1, keeps parameters": [*V1, "fsdp.sharding_strategy=SHARD_GRAD_OP"],
    "version 1, not sharded": [*V1, "fsdp.sharding_strategy=NO_SHARD"],
    "version 1, offloaded": [*V1, "fsdp.cpu_offload=true"],
}


@pytest.fixture(scope="module")
def plain(toy: list[str], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("plain") / "run", "single", 1, [*toy, "training.steps=8"])


@pytest.mark.parametrize("name", OTHER_SHARDINGS)
def test_every_way_to_shard_learns_the_same(name: str, plain: Trained, toy: list[str], tmp_path: Path) -> None:
    result = train(tmp_path / "run", "fsdp", 2, [*toy, "training.steps=8", *OTHER_SHARDINGS[name]])
    assert result.exit_codes == [0, 0], result.errors
    if "model.vocab_size=257" in OTHER_SHARDINGS[name]:
        plain = train(tmp_path / "plain", "single", 1, [*toy, "training.steps=8", "model.vocab_size=257"])
    assert result.column("loss") == pytest.approx(plain.column("loss"), rel=LOSS_TOLERANCE)
    assert result.column("grad_norm") == pytest.approx(plain.column("grad_norm"), rel=NORM_TOLERANCE)


def test_accumulation_changes_nothing_but_rounding(toy: list[str], tmp_path: Path) -> None:
    """Twice as many micro-batches of half the size: the same global batch, so the same losses."""
    whole = train(tmp_path / "whole", "ddp", 2, toy)
    halves = train(tmp_path / "halves", "ddp", 2, [*toy, "training.grad_accum_steps=2"])
    assert halves.column("loss") == pytest.approx(whole.column("loss"), rel=LOSS_TOLERANCE)
    assert halves.column("grad_norm") == pytest.approx(whole.column("grad_norm"), rel=NORM_TOLERANCE)


def test_a_changed_seed_is_seen(reference: Trained, variant: list[str], toy: list[str], tmp_path: Path) -> None:
    """The tolerance above is not so wide that anything passes."""
    other = train(tmp_path / "run", "single", 1, [*toy, *variant, "training.seed=4321"])
    assert other.column("loss") != pytest.approx(reference.column("loss"), rel=LOSS_TOLERANCE)


def test_bf16_kept_on_cpu_agrees_between_strategies(toy: list[str], tmp_path: Path) -> None:
    """Gradients are reduced in float32 whatever computes in bfloat16, so DDP and FSDP stay close."""
    results = {
        name: train(tmp_path / name, name, 2, [*toy, "training.steps=8"], argv=["--keep-precision"])
        for name in ("ddp", "fsdp")
    }
    for result in results.values():
        assert result.exit_codes == [0, 0], result.errors
        assert result.environment["observed"]["compute_dtypes"] == ["torch.bfloat16"]
        assert not [item for item in result.environment["substitutions"] if item["key"] == "mixed_precision"]
    assert results["fsdp"].column("loss") == pytest.approx(results["ddp"].column("loss"), rel=5e-4)
    assert results["fsdp"].column("grad_norm") == pytest.approx(results["ddp"].column("grad_norm"), rel=1e-2)


def test_an_epoch_ends_in_the_middle_of_these_runs(reference: Trained) -> None:
    """What the runs above read crosses an epoch's end, so they cover it: fewer samples than 20 steps of 8."""
    num_samples = reference.environment["data"]["num_samples"]
    assert num_samples < 20 * 8
    first, second = sample_ids(1234, 0, num_samples, num_samples), sample_ids(1234, num_samples, 20, num_samples)
    assert sorted(first) == list(range(num_samples))
    assert list(first[:20]) != list(second)
