"""A checkpoint of any strategy goes on under any other, as if nothing had happened; and what may change then does.

Every source is saved in the background, while the next step is computed, and in its second epoch: whoever goes on from
it has to find the place in that epoch's order.
"""

import shutil
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_parallel.spec import RunSpec, lr_at, read_spec
from accel_parallel.strategies import STRATEGIES
from accel_parallel.train.data import TokenData, TrainBatches, prepare, sample_ids
from accel_parallel.train.model import TransformerLM
from accel_parallel.train.optimize import build_optimizer
from tests.test_catalogue import SHAPE
from tests.workers import Trained, train

Layout = tuple[str, int]
LAYOUTS: list[Layout] = [
    ("single", 1), ("fsdp_shard_grad_op", 2), ("ddp", 2), ("fsdp", 4), ("fsdp1_full_shard", 2),
    ("fsdp_hybrid_shard", 4), ("fsdp_cpu_offload", 2), ("fsdp1_no_shard", 2), ("fsdp", 2),
]  # fmt: skip
# Each layout hands over to the next one: all of them write, and all of them read what another wrote.
ROUND = list(pairwise([*LAYOUTS, LAYOUTS[0]]))
SAME_IN_SHORT: list[Layout] = [("ddp", 2), ("fsdp", 2), ("fsdp1_full_shard", 2)]
NUMBERS = ("step", "tokens", "loss", "grad_norm", "lr")
TOLERANCE = 1e-5
SAVED, LAST, BATCH, SEQ_LEN = 10, 14, 32, 32
# 312 samples: the tenth batch of 32 straddles the first two epochs.
SETS = [*SHAPE, f"training.batch_size={BATCH}", f"checkpoint.every={SAVED}", "checkpoint.keep=3"]
OTHER_OPTIONS = {"training.lr": 3e-3, "training.weight_decay": 5.0, "training.betas": [0.5, 0.7]}
OTHER_BATCH = 4


def name_of(*layouts: Layout) -> str:
    return "-to-".join(f"{strategy}-{size}" for strategy, size in layouts)


class Runs:
    """Trains each layout once without stopping, and goes on from what that saved on the way."""

    def __init__(self, toy: list[str], folder: Path) -> None:
        self.sets = [*toy, *SETS]
        self.folder = folder
        self.straight = cache(self._straight)
        self.resumed = cache(self._resumed)

    def _straight(self, layout: Layout) -> Trained:
        return self._train(self.folder / name_of(layout), layout, ["checkpoint.async=true"])

    def _resumed(self, source: Layout, target: Layout, *sets: str) -> Trained:
        run = self.folder / f"{name_of(source, target)}-{len(sets)}"
        shutil.copytree(self.straight(source).run, run)
        shutil.rmtree(run / f"checkpoints/step-{LAST:08d}")
        (run / "metrics.jsonl").unlink()
        result = self._train(run, target, sets)
        assert f"continues at step {SAVED} of 20" in result.log
        assert list(result.rows()) == list(range(SAVED + 1, LAST + 1))
        return result

    def _train(self, run: Path, layout: Layout, sets: Any) -> Trained:
        result = train(run, *layout, [*self.sets, *sets], argv=["--stop-at", str(LAST)])
        assert result.exit_codes == [0] * layout[1], (result.errors, result.log)
        assert "Warning" not in result.log
        return result


@pytest.fixture(scope="module")
def runs(toy: list[str], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(toy, tmp_path_factory.mktemp("portable"))


def numbers(result: Trained) -> list[list[float]]:
    """Of the steps after the checkpoint."""
    return [[row[key] for key in NUMBERS] for step, row in result.rows().items() if step > SAVED]


def losses(result: Trained) -> list[float]:
    return [row[NUMBERS.index("loss")] for row in numbers(result)]


def short_or_slow(chosen: Any, short: Any) -> Any:
    return pytest.param(*chosen, marks=() if short else pytest.mark.slow, id=name_of(*chosen))


@pytest.mark.parametrize(
    ("source", "target"),
    [short_or_slow(pair, pair in ROUND) for pair in product(LAYOUTS, LAYOUTS) if pair[0] != pair[1]],
)
def test_goes_on_under_another_strategy(source: Layout, target: Layout, runs: Runs) -> None:
    straight, resumed = runs.straight(source), runs.resumed(source, target)
    assert losses(resumed) == pytest.approx(losses(straight), rel=TOLERANCE)
    assert resumed.column("tokens") == straight.column("tokens")[SAVED:]


@pytest.mark.parametrize("layout", [short_or_slow((layout,), layout in SAME_IN_SHORT) for layout in LAYOUTS])
def test_saved_in_the_background_it_goes_on_bit_for_bit(layout: Layout, runs: Runs) -> None:
    """In the second epoch."""
    straight, resumed = runs.straight(layout), runs.resumed(layout, layout)
    assert numbers(resumed) == numbers(straight)
    assert resumed.column("loss", "eval")[-1] == straight.column("loss", "eval")[-1]


def test_the_losses_change_enough_for_these_comparisons(runs: Runs) -> None:
    """A step that was left out, repeated, or computed from other samples would be seen."""
    for before, after in pairwise(losses(runs.straight(("ddp", 2)))):
        assert before != pytest.approx(after, rel=100 * TOLERANCE)


def test_what_is_read_next_lies_in_the_second_epoch(runs: Runs) -> None:
    num_samples = runs.straight(("ddp", 2)).environment["data"]["num_samples"]
    seen = SAVED * BATCH
    assert num_samples < seen < 2 * num_samples
    read = sample_ids(1234, seen, BATCH, num_samples)
    assert set(read) != set(sample_ids(1234, seen - num_samples, BATCH, num_samples))


@pytest.fixture(scope="module")
def data(runs: Runs) -> TokenData:
    spec = read_spec(None, runs.sets).resolve()
    return prepare(spec.data, spec.model.vocab_size, leader=True, say=lambda _: None)


def by_hand(checkpoint: Path, spec: RunSpec, data: TokenData, samples: int) -> list[float]:
    """The losses of one process that reads the tensors of a checkpoint and trains with what `spec` asks for.

    With nothing of the project's checkpoints, and options of the optimizer that are written down here once more.
    """
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, training = TransformerLM(spec.model), spec.training
    optimizer = build_optimizer(model, training)
    weights, moments = get_state_dict(model, optimizer)
    load({"model": weights, "optimizer": moments}, checkpoint_id=checkpoint, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    matrices, norms = optimizer.param_groups
    matrices["weight_decay"], norms["weight_decay"] = training.weight_decay, 0.0
    batches, found = TrainBatches(data, SEQ_LEN, training, 0, 1), []
    for step in range(SAVED + 1, LAST + 1):
        for group in optimizer.param_groups:
            group["lr"], group["betas"] = lr_at(step, training), tuple(training.betas)
        [(tokens, labels)] = batches.step(samples)
        loss = model(tokens, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        samples += training.batch_size
        found.append(loss.item())
    return found


CHANGED = [f"{key}={value}" for key, value in OTHER_OPTIONS.items()]


@pytest.mark.parametrize("layout", [("ddp", 2), ("fsdp", 2), ("fsdp1_full_shard", 2)], ids=name_of)
def test_another_batch_and_other_options_are_used_from_the_next_sample_on(
    layout: Layout, runs: Runs, data: TokenData
) -> None:
    """The optimizer's state holds the options that it was saved with, and they are not brought back."""
    sets = [*CHANGED, f"training.batch_size={OTHER_BATCH}"]
    resumed = runs.resumed(layout, layout, *sets)
    checkpoint, seen = runs.straight(layout).run / f"checkpoints/step-{SAVED:08d}", SAVED * BATCH

    def expected(samples: int, *changes: str) -> list[float]:
        spec = STRATEGIES["single"].resolve(read_spec(None, [*runs.sets, *changes]))
        return by_hand(checkpoint, spec, data, samples)

    assert losses(resumed) == pytest.approx(expected(seen, *sets), rel=TOLERANCE)
    training = read_spec(None, [*runs.sets, *sets]).resolve().training
    assert resumed.column("lr") == [lr_at(step, training) for step in range(SAVED + 1, LAST + 1)]
    tokens = [(seen + OTHER_BATCH * count) * SEQ_LEN for count in range(1, LAST - SAVED + 1)]
    assert resumed.column("tokens") == tokens

    # Each of them would have been missed.
    assert losses(resumed) != pytest.approx(expected(SAVED * OTHER_BATCH, *sets), rel=100 * TOLERANCE)
    for kept in OTHER_OPTIONS:
        changes = [entry for entry in sets if not entry.startswith(kept)]
        assert losses(resumed) != pytest.approx(expected(seen, *changes), rel=10 * TOLERANCE), kept
