"""`explain`: its plan is what real processes do, for every strategy; its text, its JSON, and what it finds wrong."""

import json
import os
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


@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize("strategy", [strategy.name for strategy in CATALOGUE])
def test_text_is_narrow_and_keeps_to_units_of_1024(strategy: str) -> None:
    result = told(strategy)
    assert result.lines[0].startswith(f"{strategy}: ")
    assert max(map(len, result.lines)) <= WIDTH
    assert not re.search(r"\d [KMG]?B\b(?<! B)", "\n".join(result.lines))
    assert (result.problems, result.exit_code) == ([], 0) or [each.severity for each in result.problems] == ["info"]
    json.dumps(result.data)


@pytest.mark.usefixtures("in_an_empty_folder")
def test_equal_units_are_one_row_and_what_stays_in_the_root_is_named() -> None:
    text = "\n".join(told("fsdp").lines)
    assert "\nblocks.0-3 TransformerBlock x4" in text
    assert "in the root unit:\n  token_emb.weight (2048 x 320), shared with head\n" in text
    assert "10 all-gathers of 17.2 MiB (bfloat16), 6 reduce-\nscatters of 18.4 MiB (float32)" in text
    assert "un-sharded peak: 5.2 MiB of gathered parameters" in text


@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize(
    ("strategy", "line"),
    [
        ("single", "nothing is sharded and nothing is reduced: one process holds the whole model"),
        ("ddp", "each process holds the whole model, 18.4 MiB; gradients are all-reduced in buckets, 18.4 MiB a step"),
        ("fsdp1_no_shard", "gradients are all-reduced by unit, 18.4 MiB a step in 5 calls"),
    ],
)
def test_where_nothing_is_sharded_one_sentence_says_so(strategy: str, line: str) -> None:
    result = told(strategy)
    assert line in " ".join(result.lines)
    assert not any(text.startswith("unit ") for text in result.lines)
    assert result.data["unsharded_peak_bytes"] is None


@pytest.mark.usefixtures("in_an_empty_folder")
def test_thresholds_of_wrap_block_are_the_size_of_a_block() -> None:
    size = read_spec(None, []).resolve().model.shape.block_parameters
    for threshold, current in ((size, 0), (size + 1, 1)):
        result = told("fsdp", f"fsdp.min_num_params={threshold}")
        steps = result.data["thresholds"]
        assert [(step["first"], step["last"]) for step in steps] == [(1, size), (size + 1, None)]
        assert [step["current"] for step in steps] == [current == 0, current == 1]
        assert steps[current]["classes"].get("TransformerBlock", 0) == (4 if current == 0 else 0)
        assert result.exit_code == current
        assert result.data["units"][-1]["name"] == "norm"


@pytest.mark.usefixtures("in_an_empty_folder")
def test_thresholds_by_size_say_where_tied_weights_come_apart(tmp_path: Path) -> None:
    by_size = ("fsdp_version: 1", "fsdp_auto_wrap_policy: SIZE_BASED_WRAP")
    result = of_file(tmp_path, *by_size, "fsdp_min_num_params: 1_000_000")
    assert result.exit_code == 0
    steps = {step["first"]: step for step in result.data["thresholds"]}
    assert steps[655_361]["fails"] is None
    assert steps[798_721]["classes"] == {"TransformerBlock": 4}
    assert [first for first, step in steps.items() if step["current"]] == [798_721]
    at_the_embedding = of_file(tmp_path, *by_size, "fsdp_min_num_params: 655360")
    assert at_the_embedding.exit_code == 1
    assert [problem.code for problem in at_the_embedding.problems] == ["explain-tied"]
    assert "token_emb.weight is shared by modules of 2 units (token_emb, head)" in str(at_the_embedding.problems[0])
    untied = of_file(tmp_path, *by_size, "fsdp_min_num_params: 655360", sets=("model.tie_embeddings=false",))
    assert untied.exit_code == 0


@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ("fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap: TransformrBlock"),
            "'TransformrBlock', which the model does not have; did you mean 'TransformerBlock'? (it has Attention x4,",
        ),
        (
            ("fsdp_auto_wrap_policy: SIZE_BASED_WRAP",),
            "no module below the root has at least fsdp_min_num_params 100,000,000: only the root unit: all parameters "
            "are gathered at once (the largest is blocks, a Sequential of 4,180,480)",
        ),
        (("fsdp_auto_wrap_policy: SIZE_BASED_WRAP", "fsdp_min_num_params: 0"), "fsdp_min_num_params 0 for no policy"),
        (("fsdp_version: 2",), "fsdp_auto_wrap_policy NO_WRAP wraps nothing: only the root unit"),
        (("fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",), "the model names none in _no_split_modules"),
    ],
)
def test_planted_faults_are_named(tmp_path: Path, lines: tuple[str, ...], said: str) -> None:
    result = of_file(tmp_path, *lines)
    assert result.exit_code == 1
    assert len(result.problems) == 1
    assert said in str(result.problems[0])


@pytest.mark.usefixtures("in_an_empty_folder")
def test_the_other_version_of_the_same_file(tmp_path: Path) -> None:
    classes = ("fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap: TransformerBlock")
    no_shard = of_file(tmp_path, "fsdp_version: 1", "fsdp_sharding_strategy: NO_SHARD", *classes)
    assert "NO_SHARD becomes FULL_SHARD over 2 processes: version 2 reads" in " ".join(no_shard.lines)
    assert no_shard.data["other_version"]["shard_size"] == 2
    second = of_file(tmp_path, "fsdp_version: 2", "fsdp_reshard_after_forward: false", *classes)
    text = "\n".join(second.lines)
    assert "version 1 of the same file:\n  5 units where version 2 has 6\n  only in version 2: norm RMSNorm\n" in text
    assert "SHARD_GRAD_OP becomes FULL_SHARD" in text
    by_size = of_file(tmp_path, "fsdp_auto_wrap_policy: SIZE_BASED_WRAP", "fsdp_min_num_params: 1000000")
    assert "fsdp_min_num_params means something else" in " ".join(by_size.lines)
    assert "Accelerate refuses parallelism_config with version 1" in " ".join(told("fsdp_hybrid_shard").lines)


@pytest.mark.usefixtures("in_an_empty_folder")
def test_other_dimensions_are_not_explained(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    sizes = "parallelism_config:\n  parallelism_config_tp_size: 2\n"
    path.write_text(f"{FILE}  fsdp_version: 2\n{sizes}")
    with pytest.raises(LaunchError, match="tp_size 2: only the sharding"):
        explain(Request(str(path)))


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 67, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 16, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.usefixtures("in_an_empty_folder")
def test_a_folder_is_explained_and_what_version_2_refuses(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    result = told("fsdp", model=str(folder))
    assert result.exit_code == 0
    units = {unit["name"]: (unit["class"], len(unit["parameters"])) for unit in result.data["units"]}
    layers = {f"model.layers.{number}": ("LlamaDecoderLayer", 9) for number in range(3)}
    ends = {"model.embed_tokens": ("Embedding", 1), "model.norm": ("LlamaRMSNorm", 2)}
    assert units == {"": ("LlamaForCausalLM", 0), **layers, **ends}
    # Accelerate's own policy reduces in bfloat16, too.
    moved = {(each["phase"], each["kind"]): each["tensor_bytes"] for each in result.data["traffic"]}
    assert moved["forward", "all_gather"] == moved["backward", "reduce_scatter"]
    refused = of_file(tmp_path, "fsdp_version: 2", "fsdp_auto_wrap_policy: SIZE_BASED_WRAP", "fsdp_min_num_params: 900",
                      model=str(folder))  # fmt: skip
    assert [problem.code for problem in refused.problems] == ["explain-container"]
    assert "model.layers is a ModuleList of" in str(refused.problems[0])


FACTORIES = """
from torch import nn
def good():
    print("from the model's own code")
    return nn.Sequential(nn.Linear(10, 10), nn.LayerNorm(10))
def bad():
    raise ValueError("no such\\nthing")
def wrong():
    return 3
def ends():
    raise SystemExit(5)
number = 3
"""


@pytest.mark.usefixtures("in_an_empty_folder")
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("mine:bad", "mine:bad failed: ValueError: no such thing (in "),
        ("mine:wrong", "mine:wrong returned int, not a torch.nn.Module"),
        ("mine:ends", "mine:ends ended its process while it was built, with exit code 5"),
        ("mine:none", "module mine has no 'none'"),
        ("mine:number", "mine:number is int, not a function"),
        ("nowhere:x", "cannot import 'nowhere': No module named 'nowhere'"),
        ("nowhere", "nowhere is neither a folder nor pkg.module:factory"),
        (".", ". has no config.json"),
        ("odd", "odd/config.json is not a model that transformers knows"),
    ],
)
def test_a_model_that_cannot_be_built_is_one_line(tmp_path: Path, model: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(FACTORIES)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "oddity"}')
    with pytest.raises(ModelError) as raised:
        told("fsdp", model=model)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 2


@pytest.mark.usefixtures("in_an_empty_folder")
def test_the_command_prints_one_object_whatever_the_model_prints(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FACTORIES)
    words = [sys.executable, "-m", "accel_parallel", "explain", "fsdp1_full_shard", "--model", "mine:good", "--json"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    result = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    content = json.loads(result.stdout)
    assert (content["command"], content["exit_code"], content["data"]["parameters"]) == ("explain", 1, 130)
    assert result.returncode == 1
    assert "from the model's own code" in result.stderr
