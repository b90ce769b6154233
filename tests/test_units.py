"""The FSDP units told from a tree of modules are those that real processes wrap: parameters, shards, collectives.

The told side knows the shape, or the modules before they are wrapped; the other side asks torch.
"""

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from accel_parallel.shapes import ModelShape
from accel_parallel.units import (
    Model,
    Sharding,
    Wrapping,
    model_of,
    shard_sizes,
    traffic,
    transformer_lm,
    units,
)
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
SIZE, CLASS, NONE = "SIZE_BASED_WRAP", "TRANSFORMER_BASED_WRAP", "NO_WRAP"


@dataclass(frozen=True)
class Case:
    """A model, how it is wrapped, and what real processes make of it."""

    source: Any
    """The shape of a `TransformerLM`, or "llama", "tied llama", "other"."""
    wrapping: Wrapping


def wrappings(shape: ModelShape) -> list[Wrapping]:
    """Every policy of both versions, by size at every edge; a tied weight in two units fails in torch."""
    sizes = [
        Wrapping(version, SIZE, min_num_params=threshold)
        for version, threshold in product((1, 2), THRESHOLDS)
        if not shape.tie_embeddings or threshold > EMBEDDING
    ]
    plain = [Wrapping(version, policy, BLOCK) for version in (1, 2) for policy in (CLASS, NONE)]
    nested = [Wrapping(version, CLASS, (*BLOCK, "FeedForward")) for version in (1, 2)]
    return [*plain, *nested, *sizes]


def foreign(version: int) -> list[Case]:
    """Models that are not ours. Without a class, a Llama names its layer itself; version 2 refuses its list by size."""
    found = [Case(name, Wrapping(version, policy)) for name in ("llama", "tied llama") for policy in (CLASS, NONE)]
    found.append(Case("other", Wrapping(version, CLASS, ("Linear",))))  # a subclass of it is one too
    if version == 1:
        found += [Case("llama", Wrapping(1, SIZE, min_num_params=size)) for size in (1_000, 2_000, 8_000, 20_000)]
        found += [Case("other", Wrapping(1, SIZE, min_num_params=size)) for size in (10, 60, 100, 300)]
    return found


def _build(source: Any) -> Any:
    import torch
    from torch import nn

    if isinstance(source, ModelShape):
        from accel_parallel.spec import RunSpec
        from accel_parallel.train.model import TransformerLM

        values = {name: getattr(source, name) for name in source.__slots__}
        model = TransformerLM(RunSpec().model.model_copy(update=values))
        model.init_weights(0)
        return model
    if source == "other":

        class Wide(nn.Linear):
            pass

        class Other(nn.Module):
            """What torch's own policy treats in a way of its own."""

            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
                self.attention = nn.MultiheadAttention(8, 2)
                self.wide = Wide(7, 13)
                self.again = self.wide
                self.scale = nn.Parameter(torch.ones(3))

        return Other()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=67, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=source == "tied llama",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _wrap_all(cases: list[Case]) -> list[dict[str, Any]]:
    """In a worker: what torch and Accelerate make of each model, and the elements that this rank holds."""
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin

    from accel_parallel.train.model_tree import describe
    from accel_parallel.train.script import enter_launch

    enter_launch(force_cpu=True, keep_precision=False)
    accelerator: Accelerator | None = None
    found = []
    for case in cases:
        wrapping, model = case.wrapping, _build(case.source)
        tree = describe(model)
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
        found.append({"tree": tree, "units": _seen(prepared, wrapping.version), **_step(prepared, case.source)})
        # Of the next model; this one's is not trained.
        accelerator._models.clear()
        accelerator._optimizers.clear()
    return found


def _seen(model: Any, version: int) -> dict[str, Any]:
    """Names of the parameters of each unit, and how many numbers of them this process holds."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    from accel_parallel.train.runtime.observe import clean_name

    seen: dict[str, Any] = {}
    names_of = {id(module): clean_name(name) for name, module in model.named_modules()}
    states = set()
    for name, module in model.named_modules():
        if version == 1 and isinstance(module, FullyShardedDataParallel):
            flat = module._handle.flat_param if module._has_params else None
            names = [clean_name(f"{name}.{fqn}".strip(".")) for fqn in flat._fqns] if flat is not None else []
            seen[clean_name(name)] = (sorted(names), flat._sharded_size.numel() if flat is not None else 0)
        elif version == 2 and isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            if id(state) in states:
                continue
            states.add(id(state))
            parameters = [each for group in state._fsdp_param_groups for each in group.fsdp_params]
            places = [parameter._module_info for parameter in parameters]
            names = [f"{names_of[id(place.module)]}.{place.param_name}".strip(".") for place in places]
            held = sum(parameter.sharded_param.to_local().numel() for parameter in parameters)
            seen[clean_name(name)] = (sorted(names), held)
    return seen


def _step(model: Any, source: Any) -> dict[str, Any]:
    """Collectives of a forward and a backward pass."""
    import torch

    from accel_parallel.train.probe import Collectives

    if source == "other":
        return {"traffic": None}
    vocab = source.vocab_size if isinstance(source, ModelShape) else 67
    tokens = torch.randint(vocab, (1, 8))
    collectives = Collectives()
    with collectives:
        collectives.enter("forward")
        loss = model(tokens, tokens) if isinstance(source, ModelShape) else model(input_ids=tokens, labels=tokens).loss
        collectives.enter("backward")
        loss.backward()
    return {"traffic": {(each.phase, each.kind): (each.count, each.tensor_bytes) for each in collectives.traffic}}


@cache
def real() -> list[tuple[Case, Model, list[dict[str, Any]]]]:
    """Every case, its model as told, and what each of two ranks saw."""
    found = []
    for version in (1, 2):
        own = [Case(shape, each) for shape in (TIED, UNTIED) for each in wrappings(shape) if each.version == version]
        cases = [*own, *foreign(version)]
        environment = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": str(version)}
        results = run_processes(_wrap_all, environment, 2, cases)
        assert [kind for kind, _ in results] == ["ok", "ok"], results
        for number, case in enumerate(cases):
            ranks = [rank[number] for _, rank in results]
            ours = isinstance(case.source, ModelShape)
            found.append((case, transformer_lm(case.source) if ours else model_of(ranks[0]["tree"]), ranks))
    return found


def test_units_are_those_that_are_wrapped() -> None:
    for case, model, ranks in real():
        told = {unit.name: sorted(unit.parameters) for unit in units(model, case.wrapping)}
        for rank in ranks:
            assert {name: names for name, (names, _) in rank["units"].items()} == told, case


def test_shards_are_those_that_are_held() -> None:
    for case, model, ranks in real():
        for unit in units(model, case.wrapping):
            held = [rank["units"][unit.name][1] for rank in ranks]
            assert held == shard_sizes(unit, Sharding(case.wrapping.version, 2)), (case, unit.name)


def test_collectives_are_those_that_are_seen() -> None:
    for case, model, ranks in real():
        told = traffic(units(model, case.wrapping), Sharding(case.wrapping.version, 2))
        for rank in ranks:
            assert rank["traffic"] in (None, told), case


def test_a_described_model_is_the_one_told_from_its_shape() -> None:
    described = {case.source: ranks[0]["tree"] for case, _, ranks in real() if isinstance(case.source, ModelShape)}
    assert set(described) == {TIED, UNTIED}
    for shape, tree in described.items():
        told, seen = transformer_lm(shape), model_of(tree)
        assert (told.final_norm, told.input_embedding, told.no_split) == (seen.final_norm, None, ())
        assert [(name, each.class_name, each.own) for name, each in told.modules.items()] == [
            (name, each.class_name, each.own) for name, each in seen.modules.items()
        ]
