"""`explain`: its plan is what real processes do, for every strategy; its text, its JSON, and what it finds wrong."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_parallel.accelerate_yaml import render_file
from accel_parallel.cli.explain import Request, Result, explain
from accel_parallel.cli.explain_text import WIDTH
from accel_parallel.errors import LaunchError, ModelError
from accel_parallel.spec import RunSpec, read_spec
from accel_parallel.strategies import CATALOGUE, STRATEGIES
from tests.conftest import TOY
from tests.test_units import _seen
from tests.workers import launcher_environment, run_processes

# An embedding of an odd number of rows, smaller than a block, so that by size exactly the blocks are units.
SHAPE = (*TOY, "model.vocab_size=257", "fsdp.min_num_params=9000")
FSDP = [strategy.name for strategy in CATALOGUE if strategy.name.startswith("fsdp")]
FILE = """\
distributed_type: FSDP
num_processes: 2
mixed_precision: 'no'
fsdp_config:
"""


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACCEL_PARALLEL_SPEC", raising=False)


def told(target: str, *sets: str, **options: Any) -> Result:
    return explain(Request(target, sets=sets, **options))


def of_file(tmp_path: Path, *lines: str, sets: tuple[str, ...] = (), model: str | None = None) -> Result:
    """Of an accelerate file whose fsdp_config has these lines."""
    path = tmp_path / "file.yaml"
    path.write_text(FILE + "".join(f"  {line}\n" for line in lines))
    return explain(Request(str(path), sets=sets, model=model))


def _observe(spec: RunSpec) -> dict[str, Any]:
    """In a worker: units, what this rank holds of them, collectives, and most bytes that were gathered at once."""
    import torch

    from accel_parallel.train.model import TransformerLM
    from accel_parallel.train.optimize import build_optimizer
    from accel_parallel.train.probe import Collectives
    from accel_parallel.train.runtime import Runtime

    torch.set_num_threads(1)
    runtime = Runtime.start(spec, keep_precision=True)
    fresh = TransformerLM(spec.model)
    fresh.init_weights(0)
    tokens, labels = torch.randint(spec.model.vocab_size, (2, 2, spec.model.seq_len))
    model, _ = runtime.prepare(fresh, build_optimizer(fresh, spec.training), tokens, labels)
    gathered: list[int] = []
    hooks = [hook for each in model.modules() for hook in _sample(each, lambda: gathered.append(_gathered(model)))]
    runtime.accelerator.backward(model(tokens, labels))
    for hook in hooks:
        hook.remove()
    collectives = Collectives()
    with collectives:
        collectives.enter("forward")
        loss = model(tokens, labels)
        collectives.enter("backward")
        runtime.accelerator.backward(loss)
    assert runtime.observed is not None
    return {
        "units": runtime.observed.units,
        "held": _seen(model, spec.fsdp.version),
        "traffic": {(each.phase, each.kind): (each.count, each.tensor_bytes) for each in collectives.traffic},
        "peak": max(gathered),
    }


def _sample(module: Any, take: Any) -> list[Any]:
    return [
        module.register_forward_pre_hook(lambda *_: take()),
        module.register_full_backward_pre_hook(lambda *_: take()),
    ]


def _gathered(model: Any) -> int:
    """Bytes of the gathered parameters that are allocated now."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    total = 0
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel) and module._has_params:
            full = getattr(module._handle.flat_param, "_full_param_padded", None)
            total += 0 if full is None else full.untyped_storage().size()
        elif isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                outputs = [output for each in group.fsdp_params for output in each.all_gather_outputs]
                if group._all_gather_result is not None:  # gathered ahead, and not yet cut into parameters
                    outputs.append(group._all_gather_result.all_gather_output)
                total += sum(output.untyped_storage().size() for output in outputs)
    return total


@pytest.mark.parametrize("strategy", FSDP)
def test_the_plan_is_what_real_processes_do(strategy: str) -> None:
    spec = STRATEGIES[strategy].resolve(read_spec(None, SHAPE))
    plan = told(strategy, *SHAPE).data
    environment = launcher_environment(render_file(spec, STRATEGIES[strategy]))
    world, machines = spec.num_processes, spec.distributed.num_machines
    results = run_processes(_observe, environment, world, spec, machines=machines)
    assert [kind for kind, _ in results] == ["ok"] * world, results
    assert plan["world_size"] == world
    for rank, (_, seen) in enumerate(results):
        units = {unit["name"]: unit for unit in plan["units"]}
        assert {name: unit["class"] for name, unit in units.items()} == seen["units"]
        place = rank % plan["shard_size"]
        assert {name: (sorted(unit["parameters"]), unit["shard_sizes"][place]) for name, unit in units.items()} == (
            seen["held"]
        )
        moved = {(each["phase"], each["kind"]): (each["count"], each["tensor_bytes"]) for each in plan["traffic"]}
        assert moved == seen["traffic"]
        assert (plan["unsharded_peak_bytes"] or 0) == seen["peak"]
