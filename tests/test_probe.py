"""What a step costs, measured in real processes, against formulas that know only the model's shape and its units."""

import importlib.util
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from accel_parallel.accelerate_yaml import render_file
from accel_parallel.spec import RunSpec, read_spec
from accel_parallel.strategies import CATALOGUE, STRATEGIES
from tests.conftest import TOY
from tests.workers import launcher_environment, run_processes

DOCS = Path(__file__).parent.parent / "docs"
# An odd number of rows in the embedding, which version 2 pads. By size, exactly the blocks are units, as in `tiny`.
# Gradients of 3 MiB, so that DDP makes several buckets of 1 MiB.
SHAPE = (*TOY, "model.vocab_size=257", "model.hidden_dim=256", "fsdp.min_num_params=200000", "ddp.bucket_cap_mb=1")
# Bytes: one row more of the embedding (version 2), or 16-byte boundaries and whole shards of each unit (version 1).
PADDING = 1024
MEASURED = ("single", "ddp", "fsdp", "fsdp_shard_grad_op", "fsdp_hybrid_shard", "fsdp1_full_shard",
            "fsdp1_shard_grad_op", "fsdp1_no_shard", "fsdp1_hybrid_shard")  # fmt: skip
PEAKS = ("single", "ddp", "fsdp", "fsdp_shard_grad_op")
# The embedding (tied to the head), 9 tensors in each of 3 blocks, the final norm.
NUM_TENSORS = 1 + 3 * 9 + 1


def specification(strategy: str) -> RunSpec:
    return STRATEGIES[strategy].resolve(read_spec(None, SHAPE))


def _observe(spec: RunSpec, peak_of: int, keep_precision: bool) -> dict[str, Any]:
    os.environ["KINETO_LOG_LEVEL"] = "99"
    import torch

    from accel_parallel.train.model import TransformerLM
    from accel_parallel.train.optimize import build_optimizer
    from accel_parallel.train.probe import observe_step
    from accel_parallel.train.runtime import Runtime, cpu
    from accel_parallel.train.training_step import training_step

    cpu.use_all_cores = lambda *_: torch.set_num_threads(1)
    runtime = Runtime.start(spec, keep_precision=keep_precision)
    fresh = TransformerLM(spec.model)
    if runtime.fills_weights():
        fresh.init_weights(0)
    tokens, labels = torch.randint(spec.model.vocab_size, (2, 2, spec.model.seq_len))
    model, optimizer = runtime.prepare(fresh, build_optimizer(fresh, spec.training), tokens, labels)
    step = training_step(runtime, model, optimizer, tokens, labels)
    return observe_step(model, optimizer, step, peak_of=peak_of).to_dict()


@cache
def observed(strategy: str, keep_precision: bool = False) -> list[dict[str, Any]]:
    """What each rank saw; every strategy runs once, in float32 unless the asked bfloat16 is kept."""
    spec = specification(strategy)
    environment = launcher_environment(render_file(spec, STRATEGIES[strategy]))
    peak_of = 3 if strategy in PEAKS else 1
    machines = spec.distributed.num_machines
    results = run_processes(_observe, environment, spec.num_processes, spec, peak_of, keep_precision, machines=machines)
    assert [kind for kind, _ in results] == ["ok"] * spec.num_processes, results
    return [result for _, result in results]


def shard_size(strategy: str) -> int:
    """How many processes share one copy; the hybrids here are 2 x 2."""
    return 1 if strategy in ("single", "ddp", "fsdp1_no_shard") else 2


def expected(strategy: str, spec: RunSpec) -> dict[tuple[str, str], tuple[int, int]]:
    """Count and bytes of the collectives by phase and kind, clipping left out."""
    shape = spec.model.shape
    whole, blocks = 4 * shape.total_parameters, 4 * shape.num_layers * shape.block_parameters
    units = shape.num_layers + (1 if strategy.startswith("fsdp1") else 2)  # and the root; version 2: the final norm
    if strategy == "single":
        return {}
    if strategy == "ddp":
        return {("backward", "all_reduce"): (ddp_buckets(spec), whole)}
    if strategy == "fsdp1_no_shard":
        return {("backward", "all_reduce"): (units, whole)}
    found = {("forward", "all_gather"): (units, whole)}
    if "shard_grad_op" not in strategy:
        found["backward", "all_gather"] = (shape.num_layers, blocks)
    found["backward", "reduce_scatter"] = (units, whole)
    if "hybrid" in strategy:
        found["backward", "all_reduce"] = (units, whole // shard_size(strategy))
    return found


def ddp_buckets(spec: RunSpec) -> int:
    """Gradients fill buckets in the order in which they are ready; the first closes at 1 MiB (torch 2.13)."""
    embedding, *others = spec.model.shape.parameters().values()
    buckets, filled, limit = 0, 0, 2**20
    for size in (*reversed(others), embedding):
        filled += 4 * size
        if filled >= limit:
            buckets, filled, limit = buckets + 1, 0, spec.ddp.bucket_cap_mb * 2**20
    return buckets + (filled > 0)


def counted(traffic: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[int, int]]:
    return {(t["phase"], t["kind"]): (t["count"], t["tensor_bytes"]) for t in traffic if t["phase"] != "clip"}


@pytest.mark.parametrize("strategy", MEASURED)
def test_collectives_of_a_step_are_what_the_units_ask_for(strategy: str) -> None:
    ranks = observed(strategy)
    wanted = expected(strategy, specification(strategy))
    for rank in ranks:
        seen = counted(rank["traffic"])
        assert {key: count for key, (count, _) in seen.items()} == {key: count for key, (count, _) in wanted.items()}
        for key, (_, size) in wanted.items():
            assert size <= seen[key][1] <= size + PADDING, key
        assert all(item["group_size"] == 2 for item in rank["traffic"])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp1_full_shard"])
def test_bf16_is_gathered_and_float32_reduced(strategy: str) -> None:
    """The policy that makes the strategies agree; Accelerate's own reduces in bfloat16."""
    wanted = expected(strategy, specification(strategy))
    for rank in observed(strategy, keep_precision=True):
        seen = counted(rank["traffic"])
        assert set(seen) == set(wanted)
        for (phase, kind), (_, size) in wanted.items():
            size = size // 2 if kind == "all_gather" else size
            assert size <= seen[phase, kind][1] <= size + PADDING, (phase, kind)


def test_ddp_reduces_as_many_buckets_as_its_limit_makes() -> None:
    assert [item["count"] for item in observed("ddp")[0]["traffic"]] == [3]


@pytest.mark.parametrize("strategy", MEASURED)
def test_clipping_moves_a_few_numbers_if_gradients_are_sharded(strategy: str) -> None:
    for rank in observed(strategy):
        clip = [item for item in rank["traffic"] if item["phase"] == "clip"]
        assert {item["kind"] for item in clip} == ({"all_reduce"} if shard_size(strategy) > 1 else set())
        assert sum(item["tensor_bytes"] for item in clip) <= 2 * 4 * NUM_TENSORS


@pytest.mark.parametrize("strategy", MEASURED)
def test_each_process_holds_its_share(strategy: str) -> None:
    share = 4 * specification(strategy).model.shape.total_parameters / shard_size(strategy)
    for rank in observed(strategy):
        memory = rank["memory"]
        assert memory["parameters"] == pytest.approx(share, abs=PADDING)
        assert memory["gradients"] == pytest.approx(share, abs=PADDING)
        # Two moments, and a step counter for each tensor.
        assert memory["optimizer_state"] == pytest.approx(2 * share, abs=2 * PADDING + 4 * NUM_TENSORS)


@pytest.mark.parametrize("strategy", MEASURED)
def test_what_stays_between_steps(strategy: str) -> None:
    """DDP keeps its buckets, version 1 its gradients."""
    for rank in observed(strategy):
        memory = rank["memory"]
        kept = memory["gradients"] if strategy == "ddp" or strategy.startswith("fsdp1") else 0
        assert memory["between_steps"] == memory["parameters"] + memory["optimizer_state"] + kept


def test_peaks_stand_in_the_order_of_what_is_held() -> None:
    # The least of the ranks, too, because a peak may be seen too high (see peak_allocated).
    peak = {name: min(rank["memory"]["peak"] for rank in observed(name)) for name in PEAKS}
    spec = specification("fsdp")
    blocks = 4 * spec.model.shape.num_layers * spec.model.shape.block_parameters
    assert 0 < peak["ddp"] - peak["single"] <= 4 * spec.model.shape.total_parameters
    assert 0 < peak["fsdp_shard_grad_op"] - peak["fsdp"] <= blocks
    assert peak["fsdp_shard_grad_op"] < peak["single"]
    for name in PEAKS:
        memory = observed(name)[0]["memory"]
        assert peak[name] > memory["parameters"] + memory["gradients"] + memory["optimizer_state"]


def test_a_plain_model_is_observed_too() -> None:
    """No process group, no accelerator, tied weights that count once."""
    import torch
    from torch import nn

    from accel_parallel.train.probe import observe_step

    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(_: object) -> None:
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()

    cost = observe_step(model, optimizer, step)
    weight = 64 * 64 * 4
    assert cost.traffic == []
    memory = cost.memory
    assert (memory.parameters, memory.gradients, memory.optimizer_state) == (weight, weight, weight)
    assert memory.between_steps == 2 * weight
    assert memory.peak >= 3 * weight


def test_peak_is_exact_and_taken_from_the_calmest_step() -> None:
    import torch

    from accel_parallel.train.probe import peak_allocated

    mib = 2**20
    calls: list[int] = []
    kept: list[torch.Tensor] = []

    def step() -> None:
        calls.append(len(calls))
        kept.append(torch.empty(mib, dtype=torch.uint8))
        torch.empty(3 * mib, dtype=torch.uint8)
        torch.empty((4 if len(calls) == 3 else 7) * mib, dtype=torch.uint8)

    assert peak_allocated(step, kept.clear, times=3) == 5 * mib
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("kind", "group_size", "sent"),
    [
        ("all_gather", 4, 750), ("reduce_scatter", 4, 750), ("all_reduce", 4, 1500), ("broadcast", 4, 1000),
        ("all_gather", 1, 0), ("all_reduce", 1, 0), ("broadcast", 1, 0),
    ],
)  # fmt: skip
def test_bytes_around_a_ring(kind: str, group_size: int, sent: int) -> None:
    from accel_parallel.train.probe import ring_bytes

    assert ring_bytes(kind, 1000, group_size) == sent


def published() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DOCS / "strategies.json").read_text())
    return content


def test_the_published_numbers_are_of_this_catalogue_and_model() -> None:
    content = published()
    assert list(content["strategies"]) == [strategy.name for strategy in CATALOGUE]
    for name, row in content["strategies"].items():
        spec = STRATEGIES[name].resolve(read_spec(None, ["training.batch_size=16"]))
        assert content["model"]["parameters"] == spec.model.shape.total_parameters
        assert counted(row["traffic"]) == expected(name, spec)
        share = 4 * spec.model.shape.total_parameters / shard_size(name)
        assert row["memory"]["parameters"] == row["memory"]["gradients"] == share


def test_the_page_says_what_follows_from_them() -> None:
    """Sentences of the page without a number in them."""
    module = importlib.util.spec_from_file_location("strategies_page", DOCS / "strategies_page.py")
    assert module is not None
    assert module.loader is not None
    page = importlib.util.module_from_spec(module)
    module.loader.exec_module(page)
    rows = published()["strategies"]
    peak = {name: row["memory"]["peak"] for name, row in rows.items()}
    for one, two in (("fsdp1_full_shard", "fsdp"), ("fsdp1_shard_grad_op", "fsdp_shard_grad_op")):
        assert peak[one] == pytest.approx(peak[two], rel=0.01)
    for preset in page.PRESETS:
        shape = page._shape(preset)
        for gpus in (2, 8):
            sent = {name: page.sent(name, shape, gpus) for name in ("ddp", "fsdp", "fsdp_shard_grad_op")}
            assert sent["fsdp_shard_grad_op"] == pytest.approx(0.75 * sent["ddp"])
            assert sent["fsdp_shard_grad_op"] < sent["fsdp"] <= sent["ddp"]
    llama = page._shape("llama3_8b")
    assert page.sent("ddp", llama, 2) == 4 * llama.total_parameters
