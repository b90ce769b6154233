"""The FSDP units told from the shape are those that real processes wrap, with the same parameters and shards."""

import math
from itertools import product
from typing import Any

import pytest

from accel_parallel.shapes import ModelShape
from accel_parallel.units import Unit, Wrapping, module_tree, shard_sizes, units
from tests.workers import run_processes

BLOCK = ("TransformerBlock",)
TIED = ModelShape(
    vocab_size=257, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=32, ffn_dim=64, seq_len=8, tie_embeddings=True
)
UNTIED = ModelShape(**{**{name: getattr(TIED, name) for name in TIED.__slots__}, "tie_embeddings": False})
EMBEDDING, HALF, MATRIX = 257 * 32, 3 * 32 * 64, 32 * 64
# Below a matrix, a matrix, a feed-forward layer, a block, the embedding, all blocks, the whole model; and just beside.
EDGES = (MATRIX, HALF, TIED.block_parameters, EMBEDDING, 2 * TIED.block_parameters, UNTIED.total_parameters)
THRESHOLDS = sorted({edge + beside for edge in EDGES for beside in (-1, 0, 1)})


def wrappings(shape: ModelShape) -> list[Wrapping]:
    """Every policy of both versions, by size at every edge; a tied weight in two units fails in torch."""
    sizes = [
        Wrapping(version, "SIZE_BASED_WRAP", min_num_params=threshold)
        for version, threshold in product((1, 2), THRESHOLDS)
        if not shape.tie_embeddings or threshold > EMBEDDING
    ]
    plain = [Wrapping(version, policy, BLOCK) for version in (1, 2) for policy in ("TRANSFORMER_BASED_WRAP", "NO_WRAP")]
    return [*plain, *sizes]


def _wrap_all(cases: list[tuple[ModelShape, Wrapping]]) -> list[dict[str, Any]]:
    """In a worker: what torch and Accelerate make of each model, and the elements that this rank holds."""
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin

    from accel_parallel.spec import RunSpec
    from accel_parallel.train.model import TransformerLM
    from accel_parallel.train.script import enter_launch

    enter_launch(force_cpu=True, keep_precision=False)
    accelerator: Accelerator | None = None
    found = []
    for shape, wrapping in cases:
        values = {name: getattr(shape, name) for name in shape.__slots__}
        model = TransformerLM(RunSpec().model.model_copy(update=values))
        model.init_weights(0)
        options: dict[str, Any] = {
            "fsdp_version": wrapping.version,
            "auto_wrap_policy": wrapping.policy.lower(),
            "transformer_cls_names_to_wrap": list(wrapping.classes) or None,
            "min_num_params": wrapping.min_num_params,
            "cpu_ram_efficient_loading": False,
            "sync_module_states": False,
        }
        options |= {"use_orig_params": True} if wrapping.version == 1 else {"reshard_after_forward": True}
        plugin = FullyShardedDataParallelPlugin(**options)
        accelerator = accelerator or Accelerator(fsdp_plugin=plugin)
        AcceleratorState._shared_state["fsdp_plugin"] = plugin
        optimizer = torch.optim.AdamW(model.parameters())
        prepared, _ = accelerator.prepare(model, optimizer)
        found.append(_seen(prepared, wrapping.version))
        # Of the next model; this one's is not trained.
        accelerator._models.clear()
        accelerator._optimizers.clear()
    return found


def _seen(model: Any, version: int) -> dict[str, Any]:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    from accel_parallel.train.runtime.observe import clean_name

    seen = {}
    names_of = {id(module): clean_name(name) for name, module in model.named_modules()}
    for name, module in model.named_modules():
        if version == 1 and isinstance(module, FullyShardedDataParallel) and module._has_params:
            handle = module._handle
            names = [clean_name(f"{name}.{fqn}".strip(".")) for fqn in handle.flat_param._fqns]
            seen[clean_name(name)] = (sorted(names), handle.flat_param._sharded_size.numel())
        elif version == 2 and isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                places = [parameter._module_info for parameter in group.fsdp_params]
                names = [f"{names_of[id(place.module)]}.{place.param_name}" for place in places]
                held = sum(parameter.sharded_param.to_local().numel() for parameter in group.fsdp_params)
                seen[clean_name(name)] = (sorted(names), held)
    return seen


@pytest.fixture(scope="module")
def real() -> list[tuple[ModelShape, Wrapping, list[dict[str, Any]]]]:
    found = []
    for version in (1, 2):
        cases = [(shape, each) for shape in (TIED, UNTIED) for each in wrappings(shape) if each.version == version]
        environment = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": str(version)}
        results = run_processes(_wrap_all, environment, 2, cases)
        assert [kind for kind, _ in results] == ["ok", "ok"], results
        found += [(*case, [rank[number] for _, rank in results]) for number, case in enumerate(cases)]
    return found


def test_units_are_those_that_are_wrapped(real: list[tuple[ModelShape, Wrapping, list[dict[str, Any]]]]) -> None:
    for shape, wrapping, ranks in real:
        told = {unit.name: sorted(unit.parameters) for unit in units(shape, wrapping)}
        for seen in ranks:
            assert {name: names for name, (names, _) in seen.items()} == told, (wrapping, shape.tie_embeddings)


def test_shards_are_those_that_are_held(real: list[tuple[ModelShape, Wrapping, list[dict[str, Any]]]]) -> None:
    for shape, wrapping, ranks in real:
        for unit in units(shape, wrapping):
            held = [seen[unit.name][1] for seen in ranks]
            assert held == shard_sizes(unit, wrapping.version, 2), (wrapping, unit.name)


def test_every_parameter_is_in_one_unit() -> None:
    for shape in (TIED, UNTIED):
        for wrapping in wrappings(shape):
            names = [name for unit in units(shape, wrapping) for name in unit.parameters]
            assert sorted(names) == sorted(shape.parameters())
            assert sum(unit.size for unit in units(shape, wrapping)) == shape.total_parameters


def test_the_tree_is_the_model() -> None:
    assert module_tree(TIED).size == TIED.total_parameters
    assert module_tree(UNTIED).size == UNTIED.total_parameters


def test_more_processes_than_rows_leave_some_without() -> None:
    unit = Unit("norm", "RMSNorm", {"norm.weight": (5,)}, False)
    assert shard_sizes(unit, 2, 4) == [2, 2, 1, 0]
    assert shard_sizes(unit, 1, 4) == [2, 2, 2, 2]
    assert sum(shard_sizes(unit, 2, 7)) == math.prod(unit.parameters["norm.weight"])
