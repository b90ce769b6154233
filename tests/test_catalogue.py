"""Every strategy of the catalogue in real processes: sharded as promised, learning what one process learns, resumable.

`single`, `ddp` and `fsdp` are also in test_parity.py and test_resume.py, on more numbers of processes.
"""

from functools import cache
from pathlib import Path

import pytest

from accel_parallel.spec import load_spec
from accel_parallel.strategies import CATALOGUE, STRATEGIES
from tests.workers import Trained, train

SHARDED = [strategy.name for strategy in CATALOGUE if strategy.pins_fsdp]
LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-3
# A block has 9,280 parameters and the embedding 257 x 32 = 8,224: by size, exactly the blocks are units, as in `tiny`.
SHAPE = ["model.vocab_size=257", "fsdp.min_num_params=9000"]
BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
VARIANTS = {
    "tied": [],
    "untied, accumulating, checkpointing": [
        "model.tie_embeddings=false", "training.grad_accum_steps=2", "model.activation_checkpointing=block",
        "training.steps=8",
    ],
    "accumulating without reducing each micro-batch": [
        "training.grad_accum_steps=2", "fsdp.sync_each_batch=false", "training.steps=8",
    ],
}  # fmt: skip


def world_of(strategy: str) -> int:
    return max(2, STRATEGIES[strategy].min_processes)


def shard_of(strategy: str) -> int:
    """How many processes share one copy of the parameters; the hybrids here are 2 x 2."""
    return 1 if strategy.endswith("no_shard") else 2


class Runs:
    """Trains each combination once."""

    def __init__(self, toy: list[str], folder: Path) -> None:
        self.sets = [*toy, *SHAPE]
        self.folder = folder
        self.get = cache(self._train)

    def _train(self, strategy: str, variant: str, argv: tuple[str, ...] = (), name: str = "run") -> Trained:
        processes = 1 if strategy == "single" else world_of(strategy)
        run = self.folder / f"{strategy}-{variant}-{name}"
        result = train(run, strategy, processes, [*self.sets, *VARIANTS[variant]], argv=argv)
        assert result.exit_codes == [0] * processes, (result.errors, result.log)
        return result


@pytest.fixture(scope="module")
def runs(toy: list[str], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(toy, tmp_path_factory.mktemp("catalogue"))


@pytest.mark.parametrize(
    "variant", ["tied", *(pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS if name != "tied")]
)
@pytest.mark.parametrize("strategy", SHARDED)
def test_learns_what_one_process_learns(strategy: str, variant: str, runs: Runs) -> None:
    reference, result = runs.get("single", variant), runs.get(strategy, variant)
    assert len(result.column("loss")) == (20 if variant == "tied" else 8)
    assert result.column("loss") == pytest.approx(reference.column("loss"), rel=LOSS_TOLERANCE)
    assert result.column("grad_norm") == pytest.approx(reference.column("grad_norm"), rel=NORM_TOLERANCE)
    assert result.column("loss", "eval") == pytest.approx(reference.column("loss", "eval"), rel=LOSS_TOLERANCE)


@pytest.mark.parametrize("strategy", SHARDED)
def test_runs_as_its_name_says(strategy: str, runs: Runs) -> None:
    environment = runs.get(strategy, "tied").environment
    asked, observed = environment["asked"], environment["observed"]
    assert runs.get(strategy, "tied").summary["strategy"] == strategy  # type: ignore[index]
    assert environment["overruled"] == []
    assert "Warning" not in runs.get(strategy, "tied").log
    assert observed["parallelism"] == ("fsdp version 1" if strategy.startswith("fsdp1") else "fsdp version 2")
    assert observed["world_size"] == world_of(strategy)
    assert asked["shard_size"] == shard_of(strategy)
    assert asked["cpu_offload"] == ("offload" in strategy)
    assert [name for name, kind in observed["units"].items() if kind == "TransformerBlock"] == BLOCKS


@pytest.mark.parametrize("strategy", SHARDED)
def test_each_process_holds_its_share_of_the_parameters(strategy: str, runs: Runs) -> None:
    shape = load_spec(sets=runs.sets).model.shape
    held = runs.get(strategy, "tied").environment["observed"]["parameters_in_each_process"]
    assert len(held) == world_of(strategy)
    # Rows that do not divide make the first shard larger; version 1 pads each parameter to 16 bytes.
    padding = max(3 * len(shape.parameters()), shape.hidden_dim)
    for elements in held:
        assert abs(elements - shape.total_parameters / shard_of(strategy)) <= padding
    assert sum(held) >= shape.total_parameters * world_of(strategy) / shard_of(strategy)


@pytest.mark.parametrize("strategy", SHARDED)
def test_resumed_run_is_the_straight_one_bit_for_bit(strategy: str, runs: Runs) -> None:
    straight = runs.get(strategy, "tied")
    runs.get(strategy, "tied", ("--stop-at", "10"), "halves")
    resumed = runs.get(strategy, "tied", (), "halves")
    assert "continues at step 10 of 20" in resumed.log
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert resumed.column(key) == straight.column(key), key
    assert resumed.column("loss", "eval")[-1] == straight.column("loss", "eval")[-1]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SHARDED)
def test_bf16_agrees_with_ddp(strategy: str, runs: Runs) -> None:
    """Products in bfloat16, gradients reduced in float32, a float32 loss: the policy that all strategies share."""
    keep = ("--keep-precision", "--stop-at", "8")
    reference, result = runs.get("ddp", "tied", keep, "bf16"), runs.get(strategy, "tied", keep, "bf16")
    for run in (reference, result):
        assert run.environment["observed"]["compute_dtypes"] == ["torch.bfloat16"]
    assert result.column("loss") == pytest.approx(reference.column("loss"), rel=5e-4)
    assert result.column("grad_norm") == pytest.approx(reference.column("grad_norm"), rel=1e-2)


UNTIED = ["model.tie_embeddings=false", "training.steps=6"]
LARGE = ["token_emb", "head"]
THRESHOLDS = {
    # With a vocabulary of 320 the embedding has 10,240 parameters.
    "below every module": ("model.vocab_size=320", 1),
    "embedding and head are units of their own": ("model.vocab_size=320", 9_000),
    "only the embedding, the head and all blocks together": ("model.vocab_size=320", 9_900),
    "above every module": ("model.vocab_size=320", 10**6),
}


@pytest.fixture(scope="module")
def untied(toy: list[str], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("untied") / "run", "single", 1, [*toy, *UNTIED])


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize(
    "strategy", ["fsdp", "fsdp1_full_shard", pytest.param("fsdp1_shard_grad_op", marks=pytest.mark.slow)]
)
def test_thresholds_of_the_wrap(strategy: str, threshold: str, untied: Trained, toy: list[str], tmp_path: Path) -> None:
    vocabulary, smallest = THRESHOLDS[threshold]
    sets = [*toy, *UNTIED, vocabulary, "fsdp.wrap=size", f"fsdp.min_num_params={smallest}"]
    result = train(tmp_path / "run", strategy, 2, sets)
    assert result.exit_codes == [0, 0], (result.errors, result.log)
    assert result.column("loss") == pytest.approx(untied.column("loss"), rel=LOSS_TOLERANCE)
    assert result.column("grad_norm") == pytest.approx(untied.column("grad_norm"), rel=NORM_TOLERANCE)
    units = set(result.environment["observed"]["units"]) - {""}
    if threshold == "below every module":
        assert {*LARGE, "blocks.0.attn.q_proj", "blocks.2.ffn.down_proj"} <= units
    elif threshold == "embedding and head are units of their own":
        # Version 2 also makes units of what holds units.
        assert units - {"blocks", "norm"} == {*LARGE, *BLOCKS}
    elif threshold == "only the embedding, the head and all blocks together":
        assert units - {"norm"} == {*LARGE, "blocks"}
    else:
        assert units - {"norm"} == set()
