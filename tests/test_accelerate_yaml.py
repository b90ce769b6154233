"""The generated files against Accelerate itself: its parser, its launcher's environment, its plugin."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.run as torchrun
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import _filter_args, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel_parallel.accelerate_yaml import dumps, loads, render, render_file
from accel_parallel.errors import LaunchError, SpecError
from accel_parallel.spec import Destination, Draft, RunSpec, destinations, dump_spec, load_spec, read_spec
from accel_parallel.strategies import CATALOGUE, STRATEGIES, Kind

CONFIGS = Path(__file__).parent.parent / "accelerate_configs"
TINY_BLOCK = 1_045_120
"""320 x (2 x 320 + 2 x 64) attention + 3 x 320 x 832 feed-forward + 2 x 320 norms."""


# --- What Accelerate makes of a YAML file ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What the launcher starts and what a worker would build. Equal outcomes mean an equal run."""

    command: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    """Without FSDP_* and PARALLELISM_CONFIG_*: the launcher exports those blindly, the plugins say which ones count."""
    plugin: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, int] = field(default_factory=dict)
    error: str = ""


@contextmanager
def clean_environment(values: dict[str, str]) -> Iterator[None]:
    prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MASTER_", "OMP_NUM_THREADS")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(prefixes)}
    with patch.dict(os.environ, {**kept, **values}, clear=True):
        yield


@cache
def launcher() -> Any:
    return launch_command_parser()


@cache
def torchrun_parser() -> Any:
    return torchrun.get_args_parser()


def accelerate_makes(text: str, folder: Path) -> Outcome:
    """The real launcher's steps on this file, up to the point where it would start processes."""
    path = folder / "config.yaml"
    path.write_text(text)
    try:
        # The probe of the port would make the outcome depend on what else runs here.
        with clean_environment({}), patch("accelerate.utils.launch.is_port_in_use", return_value=False):
            args = launcher().parse_args(["--config_file", str(path), "train.py"])
            args, _, _ = _validate_launch_command(args)
            before = dict(os.environ)
            if args.multi_gpu or args.use_fsdp:
                environment = prepare_multi_gpu_env(args)
                script = ["--training_script", "train.py", "--training_script_args", ""]
                command = vars(_filter_args(args, torchrun_parser(), script))
            else:
                argv, environment = prepare_simple_launcher_cmd_env(args)
                command = {"argv": argv}
        added = {key: value for key, value in environment.items() if before.get(key) != value}
        with clean_environment(added):
            plugin = plugin_fields() if added.get("ACCELERATE_USE_FSDP") == "true" else {}
            mesh = mesh_sizes() if added.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true" else {}
    except Exception as error:
        return Outcome(error=f"{type(error).__name__}: {error}")
    blind = ("FSDP_", "PARALLELISM_CONFIG_")
    return Outcome(command, {k: v for k, v in added.items() if not k.startswith(blind)}, plugin, mesh)


def plugin_fields() -> dict[str, Any]:
    """Version 1 with sync_module_states asks for a device while it is built; this pretends there is one."""
    with (
        patch("accelerate.utils.dataclasses.is_cuda_available", return_value=True),
        patch.object(torch.cuda, "current_device", return_value=0),
    ):
        plugin = FullyShardedDataParallelPlugin()
    fields = dict(vars(plugin))
    fields["auto_wrap_policy"] = getattr(plugin.auto_wrap_policy, "__name__", None)
    fields["param_init_fn"] = plugin.param_init_fn is not None
    fields["cpu_offload"] = type(plugin.cpu_offload).__name__ if plugin.fsdp_version == 2 else plugin.cpu_offload
    return {key: getattr(value, "name", value) for key, value in fields.items()}


def mesh_sizes() -> dict[str, int]:
    config = ParallelismConfig()
    return {name: getattr(config, f"{name}_size") for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}


def outcome_of(spec: RunSpec, name: str, folder: Path) -> Outcome:
    return accelerate_makes(render_file(spec, STRATEGIES[name]), folder)


# --- The committed files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", CATALOGUE, ids=lambda strategy: strategy.name)
def test_committed_file_is_what_the_generator_writes_today(strategy: Any) -> None:
    spec = strategy.resolve(read_spec(CONFIGS / "parallelism.yaml"))
    assert (CONFIGS / f"{strategy.name}.yaml").read_text() == render_file(spec, strategy)


def test_committed_specification_is_the_packaged_default() -> None:
    assert (CONFIGS / "parallelism.yaml").read_text() == dump_spec(RunSpec(), comments=True)


def test_no_other_file_is_committed() -> None:
    assert {path.name for path in CONFIGS.iterdir()} == {"parallelism.yaml", *(f"{name}.yaml" for name in STRATEGIES)}


@pytest.mark.parametrize(("name", "kind"), [("single", "NO"), ("ddp", "MULTI_GPU"), ("fsdp", "FSDP")])
def test_accelerate_loads_the_committed_file(name: str, kind: str) -> None:
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert config.distributed_type == kind
    assert config.num_processes == (1 if name == "single" else 2)


# --- What is asked for is what is built -----------------------------------------------------------------------------

HYBRID2 = ["distributed.processes_per_machine=4", "fsdp.sharding_strategy=HYBRID_SHARD"]
V1 = ["fsdp.version=1"]
TWO_MACHINES = ["distributed.num_machines=2", "distributed.main_process_ip=10.0.0.1"]
NO_OFFLOAD = {"cpu_offload": "NoneType"}

# fmt: off
PLUGINS: dict[str, tuple[list[str], dict[str, Any], dict[str, int]]] = {
    "version 2": ([], {
        "fsdp_version": 2, "reshard_after_forward": True, "sharding_strategy": None, "min_num_params": None,
        "auto_wrap_policy": "transformer_auto_wrap_policy", "transformer_cls_names_to_wrap": ["TransformerBlock"],
        "cpu_ram_efficient_loading": True, "activation_checkpointing": False, "backward_prefetch": None,
    }, {}),
    "version 2, grad op": (["fsdp.sharding_strategy=SHARD_GRAD_OP"], {"reshard_after_forward": False}, {}),
    "version 2, offload": (["fsdp.cpu_offload=true"], {"cpu_offload": "CPUOffloadPolicy"}, {}),
    "version 2, every process loads": (
        ["fsdp.cpu_ram_efficient_loading=false"], {"cpu_ram_efficient_loading": False}, {}),
    "version 2, size": (["fsdp.wrap=size", "fsdp.min_num_params=2M"], {
        "auto_wrap_policy": "size_based_auto_wrap_policy", "min_num_params": 2_000_000}, {}),
    "version 2, block too small": ([f"fsdp.min_num_params={TINY_BLOCK + 1}"], {
        "auto_wrap_policy": None, "transformer_cls_names_to_wrap": None}, {}),
    "version 2, block just large enough": ([f"fsdp.min_num_params={TINY_BLOCK}"], {
        "auto_wrap_policy": "transformer_auto_wrap_policy"}, {}),
    "version 2, hybrid on one machine": (HYBRID2, {"fsdp_version": 2, "reshard_after_forward": True},
        {"dp_replicate": 2, "dp_shard": 2, "tp": 1, "cp": 1, "sp": 1}),
    "version 2, hybrid 4 x 2": ([*HYBRID2, *TWO_MACHINES, "fsdp.dp_replicate=4"], {"fsdp_version": 2},
        {"dp_replicate": 4, "dp_shard": 2, "tp": 1, "cp": 1, "sp": 1}),
    "version 2, hybrid by machine": ([*HYBRID2, *TWO_MACHINES], {"fsdp_version": 2},
        {"dp_replicate": 2, "dp_shard": 4, "tp": 1, "cp": 1, "sp": 1}),
    "version 1": (V1, {
        "fsdp_version": 1, "sharding_strategy": "FULL_SHARD", "reshard_after_forward": None, "use_orig_params": True,
        "auto_wrap_policy": "size_based_auto_wrap_policy", "min_num_params": 1_000_000, "sync_module_states": True,
        "backward_prefetch": "BACKWARD_PRE", "cpu_ram_efficient_loading": True, "forward_prefetch": False,
    }, {}),
    "version 1, grad op": ([*V1, "fsdp.sharding_strategy=SHARD_GRAD_OP"], {"sharding_strategy": "SHARD_GRAD_OP"}, {}),
    "version 1, no shard": ([*V1, "fsdp.sharding_strategy=NO_SHARD"], {"sharding_strategy": "NO_SHARD"}, {}),
    "version 1, hybrid": (
        [*V1, *TWO_MACHINES, "fsdp.sharding_strategy=HYBRID_SHARD"], {"sharding_strategy": "HYBRID_SHARD"}, {}),
    "version 1, block": ([*V1, "fsdp.wrap=block"], {"transformer_cls_names_to_wrap": ["TransformerBlock"]}, {}),
    "version 1, no units": ([*V1, "fsdp.wrap=none"], {"auto_wrap_policy": None, "min_num_params": None}, {}),
    "version 1, every process loads": ([*V1, "fsdp.cpu_ram_efficient_loading=false"], {
        "cpu_ram_efficient_loading": False, "sync_module_states": True}, {}),
}
# fmt: on


@pytest.mark.parametrize("case", PLUGINS)
def test_plugin_is_the_one_asked_for(case: str, tmp_path: Path) -> None:
    sets, expected, mesh = PLUGINS[case]
    outcome = outcome_of(load_spec(sets=sets), "fsdp", tmp_path)
    assert outcome.error == ""
    assert {key: outcome.plugin[key] for key in expected} == expected
    assert outcome.mesh == mesh


def test_version_1_offload_reaches_the_plugin(tmp_path: Path) -> None:
    for value, offload in (("true", True), ("false", False)):
        outcome = outcome_of(load_spec(sets=[*V1, f"fsdp.cpu_offload={value}"]), "fsdp", tmp_path)
        assert outcome.plugin["cpu_offload"].offload_params is offload


def test_single_is_one_plain_process(tmp_path: Path) -> None:
    spec = STRATEGIES["single"].resolve(read_spec(sets=["distributed.processes_per_machine=8"]))
    outcome = outcome_of(spec, "single", tmp_path)
    assert outcome.command["argv"][1:] == ["train.py"]
    assert "MASTER_ADDR" not in outcome.environment
    assert outcome.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert not outcome.plugin


def test_ddp_starts_every_process_and_no_fsdp(tmp_path: Path) -> None:
    outcome = outcome_of(load_spec(sets=["distributed.mixed_precision='no'"]), "ddp", tmp_path)
    assert outcome.command["nproc_per_node"] == "2"
    assert outcome.environment["ACCELERATE_MIXED_PRECISION"] == "no"
    assert "ACCELERATE_USE_FSDP" not in outcome.environment
    assert not outcome.plugin


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_one_file_serves_every_machine(name: str, tmp_path: Path) -> None:
    spec = load_spec(sets=[*TWO_MACHINES, "distributed.processes_per_machine=4", "distributed.main_process_port=1234"])
    path = tmp_path / "config.yaml"
    path.write_text(render_file(spec, STRATEGIES[name]))
    assert loads(path.read_text())["num_processes"] == 8
    for rank in (0, 1):
        argv = ["--config_file", str(path), "--machine_rank", str(rank), "train.py"]
        with clean_environment({}), patch("accelerate.utils.launch.is_port_in_use", return_value=False):
            args, _, _ = _validate_launch_command(launcher().parse_args(argv))
            prepare_multi_gpu_env(args)
        assert (args.nnodes, args.node_rank, args.nproc_per_node) == ("2", rank, "4")
        assert args.rdzv_endpoint == "10.0.0.1:1234"


def test_address_of_machine_0_may_come_on_the_command_line(tmp_path: Path) -> None:
    text = render_file(load_spec(sets=["distributed.num_machines=2"]), STRATEGIES["ddp"])
    assert "main_process_ip:" not in text
    assert "--main_process_ip ADDRESS" in text
    path = tmp_path / "config.yaml"
    path.write_text(text)
    argv = ["--config_file", str(path), "--machine_rank", "1", "--main_process_ip", "10.0.0.7", "train.py"]
    with clean_environment({}), patch("accelerate.utils.launch.is_port_in_use", return_value=False):
        args, _, _ = _validate_launch_command(launcher().parse_args(argv))
        prepare_multi_gpu_env(args)
    assert args.rdzv_endpoint == "10.0.0.7:29500"


# --- No key of the specification is lost ----------------------------------------------------------------------------

# For each key that the YAML carries: a strategy, the specification around it, and another valid value.
CHANGES: dict[str, list[tuple[str, list[str], str]]] = {
    "distributed.num_machines": [("ddp", [], "2"), ("fsdp", [], "2"), ("fsdp", V1, "2")],
    "distributed.processes_per_machine": [("ddp", [], "4"), ("fsdp", [], "4"), ("fsdp", V1, "4")],
    "distributed.mixed_precision": [("single", [], "no"), ("ddp", [], "no"), ("fsdp", [], "no"), ("fsdp", V1, "no")],
    "distributed.main_process_ip": [(name, TWO_MACHINES, "10.0.0.2") for name in ("ddp", "fsdp")],
    "distributed.main_process_port": [("ddp", [], "1234"), ("fsdp", [], "1234"), ("fsdp", TWO_MACHINES, "1234")],
    "fsdp.version": [("fsdp", [], "1"), ("fsdp", ["fsdp.wrap=block"], "1")],
    "fsdp.sharding_strategy": [
        ("fsdp", [], "SHARD_GRAD_OP"),
        ("fsdp", ["distributed.processes_per_machine=4"], "HYBRID_SHARD"),
        ("fsdp", V1, "SHARD_GRAD_OP"),
        ("fsdp", V1, "NO_SHARD"),
        ("fsdp", [*V1, *TWO_MACHINES], "HYBRID_SHARD"),
    ],
    "fsdp.wrap": [("fsdp", [], "size"), ("fsdp", [], "none"), ("fsdp", V1, "block"), ("fsdp", V1, "none")],
    "fsdp.min_num_params": [("fsdp", [], "2M"), ("fsdp", ["fsdp.wrap=size"], "2M"), ("fsdp", V1, "2M")],
    "fsdp.cpu_offload": [("fsdp", [], "true"), ("fsdp", V1, "true")],
    "fsdp.dp_replicate": [("fsdp", ["distributed.processes_per_machine=8", HYBRID2[1]], "4")],
    "fsdp.cpu_ram_efficient_loading": [("fsdp", [], "false"), ("fsdp", V1, "false")],
}


def yaml_keys() -> set[str]:
    return {key for key, destination, _ in destinations() if destination is Destination.YAML}


def test_every_key_of_the_yaml_is_perturbed() -> None:
    assert set(CHANGES) == yaml_keys()


@pytest.mark.parametrize(
    ("key", "name", "around", "value"),
    [(key, *change) for key, changes in CHANGES.items() for change in changes],
)
def test_changing_a_key_changes_what_runs(key: str, name: str, around: list[str], value: str, tmp_path: Path) -> None:
    before = STRATEGIES[name].resolve(read_spec(sets=around))
    after = STRATEGIES[name].resolve(read_spec(sets=[*around, f"{key}={value}"]))
    first, second = outcome_of(before, name, tmp_path), outcome_of(after, name, tmp_path)
    assert first.error == second.error == ""
    assert first != second


def test_keys_that_the_yaml_does_not_carry_do_not_reach_it() -> None:
    sets = ["training.lr=1e-2", "ddp.bucket_cap_mb=50", "fsdp.sync_each_batch=false", "distributed.timeout_minutes=5"]
    for strategy in CATALOGUE:
        specs = [strategy.resolve(read_spec(sets=entries)) for entries in ([], sets)]
        assert render(specs[0], strategy) == render(specs[1], strategy)


# --- Any valid specification ----------------------------------------------------------------------------------------


@st.composite
def specs(draw: st.DrawFn) -> tuple[RunSpec, str]:
    """A valid specification and a strategy that it allows."""
    name = draw(st.sampled_from(["single", "ddp", "fsdp"]))
    version = draw(st.sampled_from([1, 2]))
    sharding = draw(st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", *(["NO_SHARD"] * (version == 1))]))
    machines, per_machine = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    replicate = None
    if sharding == "HYBRID_SHARD":
        if version == 1:
            machines, per_machine = max(2, machines), max(2, per_machine)
        else:
            replicate = draw(st.integers(2, 4))
            machines, per_machine = draw(st.sampled_from([1, replicate])), replicate * draw(st.integers(2, 3))
    accumulate = draw(st.integers(1, 3))
    wrap = draw(st.sampled_from(["block", "size", "none"]))
    spec = RunSpec.model_validate(
        {
            "distributed": {
                "num_machines": machines,
                "processes_per_machine": per_machine,
                "mixed_precision": draw(st.sampled_from(["no", "bf16"])),
                "main_process_ip": draw(st.sampled_from([None, "10.0.0.1", "node-0", "::1", "1:30", "no", "0x10"])),
                "main_process_port": draw(st.none() | st.integers(1, 65535)),
            },
            "fsdp": {
                "version": version,
                "sharding_strategy": sharding,
                "wrap": wrap,
                "min_num_params": draw(
                    st.sampled_from([1, 1_000_000, TINY_BLOCK, TINY_BLOCK + 1]) | st.integers(1, 10**12)
                ),
                "cpu_offload": draw(st.booleans()),
                "dp_replicate": replicate,
                "cpu_ram_efficient_loading": draw(st.booleans()),
            },
            "model": {"num_layers": draw(st.integers(1, 9)), "tie_embeddings": wrap != "size"},
            "training": {
                "batch_size": machines * per_machine * accumulate * draw(st.integers(1, 3)),
                "grad_accum_steps": accumulate,
            },
        }
    )
    return STRATEGIES[name].resolve(Draft("drawn", spec.model_dump(mode="json", by_alias=True), {})), name


def assert_as_asked(spec: RunSpec, name: str, outcome: Outcome) -> None:
    """What the specification means, said once more and without the generator."""
    distributed, fsdp = spec.distributed, spec.fsdp
    assert outcome.error == ""
    assert outcome.environment["ACCELERATE_MIXED_PRECISION"] == distributed.mixed_precision
    assert bool(outcome.plugin) == (name == "fsdp")
    if name == "single":
        assert outcome.command["argv"][1:] == ["train.py"]
        return
    assert outcome.command["nproc_per_node"] == str(distributed.processes_per_machine)
    port = distributed.main_process_port or 29500
    if distributed.num_machines > 1:
        assert outcome.command["nnodes"] == str(distributed.num_machines)
        assert outcome.command["rdzv_endpoint"] == f"{distributed.main_process_ip}:{port}"
    else:
        assert outcome.command["master_port"] == str(port)
    if name == "ddp":
        return
    plugin, hybrid = outcome.plugin, fsdp.sharding_strategy == "HYBRID_SHARD"
    assert plugin["fsdp_version"] == fsdp.version
    assert plugin["cpu_ram_efficient_loading"] is fsdp.cpu_ram_efficient_loading
    wraps = fsdp.wrap == "block" and fsdp.min_num_params <= TINY_BLOCK
    assert plugin["transformer_cls_names_to_wrap"] == (["TransformerBlock"] if wraps else None)
    # No module below the root is larger than all blocks together, unless it is the embedding.
    largest = max(TINY_BLOCK * spec.model.num_layers, 2048 * 320)
    by_size = fsdp.wrap == "size" and fsdp.min_num_params + (fsdp.version == 2) <= largest
    assert plugin["min_num_params"] == (fsdp.min_num_params if by_size else None)
    assert (plugin["auto_wrap_policy"] is not None) == (wraps or by_size)
    if fsdp.version == 2:
        assert plugin["reshard_after_forward"] is (fsdp.sharding_strategy != "SHARD_GRAD_OP")
        assert (plugin["cpu_offload"] == "CPUOffloadPolicy") is fsdp.cpu_offload
        assert bool(outcome.mesh) is hybrid
        if hybrid:
            assert outcome.mesh["dp_replicate"] == fsdp.dp_replicate
            assert outcome.mesh["dp_replicate"] * outcome.mesh["dp_shard"] == spec.num_processes
    else:
        assert plugin["sharding_strategy"] == fsdp.sharding_strategy
        assert plugin["cpu_offload"].offload_params is fsdp.cpu_offload
        assert plugin["use_orig_params"] is plugin["sync_module_states"] is True
        assert not outcome.mesh


# Another valid value for each key, to see whether it matters.
OTHER: dict[str, Any] = {
    "distributed_type": lambda old: "MULTI_GPU" if old == "FSDP" else "FSDP",
    "num_processes": lambda old: old * 2,
    "num_machines": lambda old: old + 1,
    "main_process_ip": lambda old: "10.9.8.7",
    "main_process_port": lambda old: old % 65535 + 1,
    "mixed_precision": lambda old: "no" if old == "bf16" else "bf16",
    "fsdp_version": lambda old: 3 - old,
    "fsdp_sharding_strategy": lambda old: "NO_SHARD" if old == "FULL_SHARD" else "FULL_SHARD",
    "fsdp_auto_wrap_policy": lambda old: "NO_WRAP" if old != "NO_WRAP" else "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": lambda old: "Another",
    "fsdp_min_num_params": lambda old: old + 1,
    "fsdp_backward_prefetch": lambda old: "BACKWARD_POST",
    "parallelism_config_dp_replicate_size": lambda old: old + 1,
    "parallelism_config_dp_shard_size": lambda old: old + 1,
}


def dead_keys(config: dict[str, Any], folder: Path) -> list[str]:
    """Keys that neither removing nor changing makes any difference to what runs."""
    as_is, dead = accelerate_makes(yaml.safe_dump(config), folder), []
    for section in (None, "fsdp_config", "parallelism_config"):
        part = config if section is None else config.get(section, {})
        for key, value in part.items():
            if isinstance(value, dict):
                continue
            other = (not value) if isinstance(value, bool) else OTHER[key](value)
            without = {name: entry for name, entry in part.items() if name != key}
            changed = [{**part, key: other}, without]
            variants = changed if section is None else [{**config, section: entry} for entry in changed]
            if all(accelerate_makes(yaml.safe_dump(variant), folder) == as_is for variant in variants):
                dead.append(key)
    return dead


SLOW_FIXTURE = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=300, deadline=None, suppress_health_check=SLOW_FIXTURE)
@given(specs())
def test_any_valid_specification_gives_what_it_asks_for(tmp_path: Path, drawn: tuple[RunSpec, str]) -> None:
    spec, name = drawn
    text = render_file(spec, STRATEGIES[name])
    assert loads(text) == render(spec, STRATEGIES[name])
    assert max(len(line) for line in text.splitlines()) <= 120
    assert_as_asked(spec, name, accelerate_makes(text, tmp_path))


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW_FIXTURE)
@given(specs())
def test_no_key_is_dead(tmp_path: Path, drawn: tuple[RunSpec, str]) -> None:
    spec, name = drawn
    assert dead_keys(render(spec, STRATEGIES[name]), tmp_path) == []


@pytest.mark.parametrize("version", [1, 2])
def test_keys_whose_default_the_launcher_changes_are_written(version: int, tmp_path: Path) -> None:
    """The same plugin must come out whether the launcher fills what is missing or nobody does (torchrun)."""
    bare = f"distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {{fsdp_version: {version}}}\n"
    launched = accelerate_makes(bare, tmp_path).plugin
    with clean_environment({"FSDP_VERSION": str(version)}):
        alone = plugin_fields()
    differing = {key for key in launched if launched[key] != alone[key]}
    assert "cpu_ram_efficient_loading" in differing
    written = render(load_spec(sets=[f"fsdp.version={version}"]), STRATEGIES["fsdp"])["fsdp_config"]
    # param_init_fn is made by sync_module_states.
    assert {f"fsdp_{key}" for key in differing - {"param_init_fn"}} <= set(written)


@pytest.mark.parametrize(
    ("version", "key", "value"),
    [
        (1, "fsdp_reshard_after_forward", "SHARD_GRAD_OP"),
        (2, "fsdp_sharding_strategy", "FULL_SHARD"),
        (2, "fsdp_use_orig_params", True),
        (2, "fsdp_min_num_params", 1000),
        (2, "fsdp_backward_prefetch", "BACKWARD_PRE"),
    ],
)
def test_the_check_for_dead_keys_finds_one(version: int, key: str, value: Any, tmp_path: Path) -> None:
    config = render(load_spec(sets=[f"fsdp.version={version}"]), STRATEGIES["fsdp"])
    config["fsdp_config"][key] = value
    # Which strings version 1 would take for the reshard key does not matter: it reads none of them.
    with patch.dict(OTHER, {"fsdp_reshard_after_forward": lambda old: "NO_SHARD"}):
        assert dead_keys(config, tmp_path) == [key]


# --- What cannot be rendered ----------------------------------------------------------------------------------------


HYBRID = "fsdp.sharding_strategy=HYBRID_SHARD"


@pytest.mark.parametrize(
    ("name", "sets", "says"),
    [
        (
            "ddp",
            ["training.batch_size=33"],
            "33 does not divide by 2 processes x 1 micro-batches = 2; nearest that do: 32",
        ),
        ("single", [], "is one process; the specification asks for 2"),
        ("fsdp", [HYBRID], "2 replicas on 1 x 2 = 2 processes leave 1 process to shard over"),
        ("fsdp", [*HYBRID2, "fsdp.dp_replicate=3"], "fsdp.dp_replicate 3 does not divide 1 x 4 = 4 processes"),
        ("fsdp", [*HYBRID2, "fsdp.dp_replicate=8"], "fsdp.dp_replicate 8 does not divide 1 x 4 = 4 processes"),
        ("fsdp", [*HYBRID2, "fsdp.dp_replicate=1"], "HYBRID_SHARD needs at least 2 replicas"),
        ("fsdp", [*V1, HYBRID], "one machine has nothing to replicate to"),
        ("fsdp", [*V1, "fsdp.min_num_params=655360"], "would make two units of the tied token_emb and head"),
        ("fsdp", ["fsdp.wrap=size", "fsdp.min_num_params=655359"], "would make two units of the tied token_emb"),
    ],
)
def test_what_cannot_be_rendered_is_refused(name: str, sets: list[str], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        render(load_spec(sets=sets), STRATEGIES[name])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_everything_in_the_way_is_named_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        render(load_spec(sets=[*HYBRID2, "fsdp.dp_replicate=3", "training.batch_size=33"]), STRATEGIES["fsdp"])
    assert len(caught.value.problems) == 2


def test_threshold_at_the_size_of_a_tied_embedding() -> None:
    """Version 1 wraps what is >= the threshold, version 2 what is > it."""
    for version, smallest in ((1, 655_361), (2, 655_360)):
        sets = [f"fsdp.version={version}", "fsdp.wrap=size", f"fsdp.min_num_params={smallest}"]
        assert render(load_spec(sets=sets), STRATEGIES["fsdp"])


# --- The text -------------------------------------------------------------------------------------------------------


def test_header_and_reasons() -> None:
    text = render_file(load_spec(), STRATEGIES["fsdp"], source="mine.yaml")
    assert text.splitlines()[1] == "# generated by `accel-parallel config` from mine.yaml, do not edit"
    assert "4 units: a block has 1,045,120 >= 1,000,000 parameters" in text
    small = render_file(load_spec(sets=["fsdp.min_num_params=2M"]), STRATEGIES["fsdp"])
    assert "no inner units: a block has 1,045,120 < 2,000,000 parameters" in small
    hybrid = render_file(load_spec(sets=HYBRID2), STRATEGIES["fsdp"])
    assert "HYBRID_SHARD: free gathered" in hybrid
    assert "FULL_SHARD" not in hybrid


@settings(max_examples=60, deadline=None)
@given(specs())
def test_every_key_has_a_reason(drawn: tuple[RunSpec, str]) -> None:
    spec, name = drawn
    lines = render_file(spec, STRATEGIES[name]).splitlines()[3:]
    assert all("  # " in line or line.endswith("_config:") or line.lstrip().startswith("# ") for line in lines)


def test_words_that_yaml_reads_as_booleans_are_quoted() -> None:
    text = dumps({"distributed_type": "NO", "mixed_precision": "no", "num_processes": 1})
    assert "distributed_type: 'NO'" in text
    assert "mixed_precision: 'no'" in text
    assert loads(text) == {"distributed_type": "NO", "mixed_precision": "no", "num_processes": 1}


def test_counts_are_plain_integers() -> None:
    assert "fsdp_min_num_params: 2000000 " in render_file(
        load_spec(sets=["fsdp.wrap=size", "fsdp.min_num_params=2e6"]), STRATEGIES["fsdp"]
    )


@pytest.mark.parametrize("text", ["", "- a", "just words", "a: [", "a: \x00", "[" * 5000])
def test_loads_refuses_what_is_not_a_mapping(text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        loads(text)
    assert "\n" not in str(caught.value)


def test_all_kinds_are_in_the_catalogue() -> None:
    assert {strategy.kind for strategy in CATALOGUE} == set(Kind)


def test_the_harness_sees_errors(tmp_path: Path) -> None:
    assert "num_processes" in accelerate_makes("distributed_type: FSDP\n", tmp_path).error
