"""The FSDP units told from a tree of modules are those that real processes wrap: parameters, shards, collectives.

The told side knows the shape, or the modules before they are wrapped; the other side asks torch.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from accel_parallel.shapes import ModelShape
from accel_parallel.units import (
    Model,
    Module,
    Sharding,
    Unit,
    Wrapping,
    bands,
    model_of,
    padded_size,
    peaks,
    refused,
    shard_sizes,
    sharded_twice,
    split_parameters,
    traffic,
    transformer_lm,
    units,
)
from tests.workers import run_processes


def changed(shape: ModelShape, **values: int | bool) -> ModelShape:
    return ModelShape(**{**{name: getattr(shape, name) for name in shape.__slots__}, **values})


BLOCK = ("TransformerBlock",)
TIED = ModelShape(
    vocab_size=257, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=32, ffn_dim=64, seq_len=8, tie_embeddings=True
)
UNTIED = changed(TIED, tie_embeddings=False)
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


def failing(version: int) -> list[Case]:
    """What torch fails on: a list of layers, an embedding inside of a unit, and, in a step, a weight in two units."""
    split = Case(TIED, Wrapping(version, SIZE, min_num_params=EMBEDDING - 1))
    lists = [Case(name, Wrapping(2, SIZE, min_num_params=3_000)) for name in ("llama", "tied llama")]
    twice = Case("llama", Wrapping(2, SIZE, min_num_params=7_500))
    return [*lists, twice, split] if version == 2 else [split]


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
        stepped = case.source != "other" and (wrapping.policy != SIZE or case in failing(wrapping.version))
        try:
            prepared, _ = accelerator.prepare(model, optimizer)
            step = _step(prepared, case.source) if stepped else None
        except Exception as error:
            found.append({"tree": tree, "error": str(error)})
            continue
        found.append({"tree": tree, "units": _seen(prepared, wrapping.version), "traffic": step})
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

    vocab = source.vocab_size if isinstance(source, ModelShape) else 67
    tokens = torch.randint(vocab, (1, 8))
    collectives = Collectives()
    with collectives:
        collectives.enter("forward")
        loss = model(tokens, tokens) if isinstance(source, ModelShape) else model(input_ids=tokens, labels=tokens).loss
        collectives.enter("backward")
        loss.backward()
    return {(each.phase, each.kind): (each.count, each.tensor_bytes) for each in collectives.traffic}


@cache
def everything() -> list[tuple[Case, Model, list[dict[str, Any]]]]:
    """Every case, its model as told, and what each of two ranks saw."""
    found = []
    for version in (1, 2):
        own = [Case(shape, each) for shape in (TIED, UNTIED) for each in wrappings(shape) if each.version == version]
        cases = [*own, *foreign(version), *failing(version)]
        environment = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": str(version)}
        results = run_processes(_wrap_all, environment, 2, cases)
        assert [kind for kind, _ in results] == ["ok", "ok"], results
        for number, case in enumerate(cases):
            ranks = [rank[number] for _, rank in results]
            ours = isinstance(case.source, ModelShape)
            found.append((case, transformer_lm(case.source) if ours else model_of(ranks[0]["tree"]), ranks))
    return found


def real() -> list[tuple[Case, Model, list[dict[str, Any]]]]:
    return [each for each in everything() if each[0] not in failing(each[0].wrapping.version)]


def test_what_fails_is_told() -> None:
    for case, model, ranks in everything():
        found = units(model, case.wrapping)
        lists, twice = refused(model, case.wrapping), sharded_twice(model, case.wrapping)
        told = bool(lists or twice or split_parameters(model, found))
        assert [told, told] == ["error" in rank for rank in ranks] == [case in failing(case.wrapping.version)] * 2, case
        if lists:
            assert all("containers that do not implement forward" in rank["error"] for rank in ranks), case


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


def test_every_parameter_is_in_one_unit() -> None:
    for shape in (TIED, UNTIED):
        model = transformer_lm(shape)
        for wrapping in wrappings(shape):
            found = units(model, wrapping)
            assert sorted(name for unit in found for name in unit.parameters) == sorted(shape.parameters())
            assert sum(unit.size for unit in found) == shape.total_parameters == model.root.size


def test_more_processes_than_rows_leave_some_without() -> None:
    unit = Unit("norm", "RMSNorm", {"norm.weight": (5,)}, False)
    assert shard_sizes(unit, Sharding(2, 4)) == [2, 2, 1, 0]
    assert shard_sizes(unit, Sharding(1, 4)) == [2, 2, 2, 2]
    assert sum(shard_sizes(unit, Sharding(2, 7))) == 5


def test_version_1_aligns_what_it_gathers() -> None:
    """Each parameter begins at 16 bytes, of bfloat16 as well; without original parameters nothing is aligned."""
    unit = Unit("", "", {"a": (5,), "b": (3,)}, False)
    sizes = [padded_size(unit, Sharding(1, 2, param_bytes=size, aligned=on)) for size in (4, 2) for on in (True, False)]
    assert sizes == [12, 8, 12, 8]
    assert padded_size(unit, Sharding(2, 2)) == 6 + 4


def test_bands_change_the_plan_and_nothing_between_does() -> None:
    """Against every single threshold of a model small enough to try them all."""
    model = transformer_lm(changed(UNTIED, vocab_size=9, ffn_dim=24))
    for version in (1, 2):
        told = bands(model, Wrapping(version, SIZE))
        assert told[0].first == 1
        assert told[-1].last is None
        of_each = {
            threshold: [unit.name for unit in units(model, Wrapping(version, SIZE, min_num_params=threshold))]
            for threshold in range(1, model.root.size + 3)
        }
        changes = [1, *(each for each in range(2, model.root.size + 3) if of_each[each] != of_each[each - 1])]
        assert [band.first for band in told] == changes
        for band in told:
            assert (
                [unit.name for unit in band.units] == of_each[band.first] == of_each.get(band.last, of_each[band.first])
            )


def test_peak_is_the_root_and_the_two_largest_neighbours() -> None:
    model, sharding = transformer_lm(UNTIED), Sharding(1, 2)
    block, root = 4 * UNTIED.block_parameters, 4 * (UNTIED.total_parameters - 2 * UNTIED.block_parameters)
    reshards = Wrapping(1, CLASS, BLOCK)
    found = peaks(model, units(model, reshards), sharding)
    assert found == {"": root + 2 * block, "blocks.0": root + 2 * block, "blocks.1": root + 2 * block}
    three = transformer_lm(
        ModelShape(**{**{name: getattr(UNTIED, name) for name in UNTIED.__slots__}, "num_layers": 3})
    )
    assert peaks(three, units(three, reshards), sharding)[""] == root + 2 * block
    keeps = replace(reshards, reshards=False)
    assert peaks(three, units(three, keeps), sharding)[""] == root + 3 * block


def test_shared_weights_in_two_units_and_lists_of_modules_are_told() -> None:
    tied = transformer_lm(TIED)
    split = split_parameters(tied, units(tied, Wrapping(1, SIZE, min_num_params=EMBEDDING)))
    assert split == {"token_emb.weight": ["token_emb", "head"]}
    assert not split_parameters(tied, units(tied, Wrapping(1, CLASS, BLOCK)))
    inner = Module("layers", "ModuleList", children=(Module("layers.0", "Linear", {"layers.0.weight": (9, 9)}),))
    model = Model(Module("", "Net", children=(replace(inner, has_forward=False),)))
    assert [each.name for each in refused(model, Wrapping(2, SIZE, min_num_params=80))] == ["layers"]
    assert not refused(model, Wrapping(2, SIZE, min_num_params=81))
    assert not refused(model, Wrapping(1, SIZE, min_num_params=80))


def test_a_described_model_is_the_one_told_from_its_shape() -> None:
    described = {case.source: ranks[0]["tree"] for case, _, ranks in real() if isinstance(case.source, ModelShape)}
    assert set(described) == {TIED, UNTIED}
    for shape, tree in described.items():
        told, seen = transformer_lm(shape), model_of(tree)
        assert (told.final_norm, told.input_embedding, told.no_split) == (seen.final_norm, None, ())
        assert [(name, each.class_name, each.own) for name, each in told.modules.items()] == [
            (name, each.class_name, each.own) for name, each in seen.modules.items()
        ]
