"""`launch STRATEGY|FILE` up to the point where something would start: what is found, refused, printed."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from accel_parallel.accelerate_yaml import loads, render_file
from accel_parallel.cli import main
from accel_parallel.cli.target import find_target
from accel_parallel.cli.words import LAUNCH_EPILOG
from accel_parallel.launch import launcher_environment as without_traces
from accel_parallel.launch import shell_environment
from accel_parallel.spec import read_spec
from accel_parallel.strategies import CATALOGUE, STRATEGIES, Strategy
from tests.workers import launcher_environment

DDP = "distributed_type: MULTI_GPU\nnum_processes: 2\n"
FSDP = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: NO_WRAP}\n"
NO = "distributed_type: 'NO'\n"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACCEL_PARALLEL_SPEC", raising=False)
    # What other tests of this process left in its environment.
    for key in set(os.environ) - set(without_traces(os.environ, 1)):
        monkeypatch.delenv(key)


@pytest.fixture(autouse=True)
def nothing_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def supervise(*arguments: object) -> None:
        raise AssertionError(f"started {arguments}")

    monkeypatch.setattr("accel_parallel.restarts.supervise", supervise)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of one command line in this process."""
    argv, sys.argv = sys.argv, ["accel-parallel", *arguments]
    try:
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
    finally:
        sys.argv = argv
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of a command line that is wrong; nothing was printed, started or left."""
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not Path("runs").exists()
    return err.removeprefix("error: ").rstrip("\n")


def accelerate_takes(command: str) -> list[str]:
    """What `accelerate launch` would start for this command line, by its own parser: the script and its arguments."""
    from accelerate.commands.launch import launch_command_parser

    program, verb, *arguments = shlex.split(command)
    assert (program, verb) == ("accelerate", "launch")
    parsed = launch_command_parser().parse_args(arguments)
    assert parsed.module
    return [str(parsed.training_script), *parsed.training_script_args]


# --- Files that are not right ----------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str | bytes, str]] = {
    "not UTF-8": (b"\xff\xfe\x00", "f.yaml is not UTF-8 text"),
    "not YAML": (
        "a: 1\nb: %\n",
        "cannot start any token in line 2",
    ),
    "a value that YAML cannot read": ("a: !!timestamp x\n", "f.yaml is not valid YAML: "),
    "a character that YAML forbids": ("a: \x07\n", "f.yaml is not valid YAML: "),
    "an alias": (
        "a: &a 1\nb: *a\n",
        "f.yaml is not valid YAML: an alias (*name) is used; write the value out in line 2",
    ),
    "a list": ("- MULTI_GPU\n", "f.yaml should be a mapping with distributed_type, not a list"),
    "text": ("MULTI_GPU\n", "f.yaml should be a mapping with distributed_type, not a str"),
    "empty": ("", "f.yaml is empty, and should be a mapping with distributed_type"),
    "only a comment": ("# later\n", "f.yaml is empty, and should be a mapping with distributed_type"),
    "too large": ("#" * 1_000_001, "f.yaml has more than 1,000,000 bytes: not an accelerate file"),
    "no type": (
        "num_processes: 2\n",
        "f.yaml has no distributed_type: not an accelerate file (`accelerate config` and `accel-parallel config` write",
    ),
    "DDP": (
        "distributed_type: DDP\n",
        "f.yaml: distributed_type is 'DDP', which Accelerate does not know; DDP is MULTI_GPU",
    ),
    "TPU": ("distributed_type: TPU\n", "f.yaml: distributed_type is 'TPU', which Accelerate does not know; TPU is XLA"),
    "small letters": ("distributed_type: fsdp\n", "does not know; did you mean 'FSDP'?"),
    "misspelt": ("distributed_type: FDSP\n", "does not know; did you mean 'FSDP'?"),
    "SageMaker": (
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\n",
        "f.yaml: compute_environment is 'AMAZON_SAGEMAKER'; only LOCAL_MACHINE is launched here",
    ),
    "no processes": (
        "distributed_type: FSDP\n",
        "f.yaml has no num_processes (add it, or pass --num-processes)",
    ),
    "0 processes": (
        "distributed_type: FSDP\nnum_processes: 0\n",
        "f.yaml: num_processes is 0, and should be a whole number of at least 1",
    ),
    "four processes": ("distributed_type: FSDP\nnum_processes: four\n", "f.yaml: num_processes is 'four', and should"),
    "true processes": ("distributed_type: FSDP\nnum_processes: true\n", "f.yaml: num_processes is True, and should"),
    "2.5 processes": ("distributed_type: FSDP\nnum_processes: 2.5\n", "f.yaml: num_processes is 2.5, and should"),
    "² processes": ("distributed_type: FSDP\nnum_processes: ²\n", "f.yaml: num_processes is '²', and should"),
    "-1 processes": ("distributed_type: FSDP\nnum_processes: -1\n", "f.yaml: num_processes is -1, and should"),
    "four processes under NO": (NO + "num_processes: four\n", "f.yaml: num_processes is 'four', and should"),
    "0 machines": (DDP + "num_machines: 0\n", "f.yaml: num_machines is 0, and should"),
    "uneven": (
        "distributed_type: MULTI_GPU\nnum_processes: 7\nnum_machines: 2\n",
        "f.yaml: num_processes 7 is the total over 2 machines, which cannot share it evenly (nearest that do: 6 or 8)",
    ),
    "fewer than machines": (
        "distributed_type: MULTI_GPU\nnum_processes: 2\nnum_machines: 3\n",
        "num_processes 2 is the total over 3 machines, which cannot share it evenly (nearest that do: 3)",
    ),
    "NO on two machines": (
        NO + "num_machines: 2\n",
        "f.yaml: distributed_type 'NO' is one process, num_machines is 2",
    ),
    "MULTI_CPU": (
        "distributed_type: MULTI_CPU\nnum_processes: 2\n",
        "f.yaml: under MULTI_CPU Accelerate starts one process of 2 unless mpirun starts them "
        "(MULTI_GPU and FSDP run on CPU processes here)",
    ),
    "DeepSpeed": (
        "distributed_type: DEEPSPEED\nnum_processes: 2\n",
        "f.yaml: distributed_type DEEPSPEED: the training loop runs under NO, MULTI_GPU or FSDP "
        "(a script of yours may run under it: -- SCRIPT)",
    ),
    "fp16": (
        DDP + "mixed_precision: fp16\n",
        "mixed_precision fp16 in the accelerate YAML: this loop trains with no or",
    ),
    "no unquoted": (
        DDP + "mixed_precision: no\n",
        "f.yaml: mixed_precision is False, and should be text (put it in quot",
    ),
    "a port that is text": (
        DDP + "main_process_port: any\n",
        "f.yaml: main_process_port is 'any', and should be a whole",
    ),
    "port 99999": (
        DDP + "main_process_port: 99999\n",
        "f.yaml: main_process_port is 99999, and the last port is 65535",
    ),
    "no address": (
        DDP + "num_machines: 2\n",
        "2 machines need the address of machine 0 (distributed.main_process_ip, or main_process_ip in a file of yours)",
    ),
    "two words for an address": (
        DDP + "num_machines: 2\nmain_process_ip: first machine\n",
        "f.yaml: main_process_ip is 'first machine', and should be an address",
    ),
    "no rank": (
        DDP + "num_machines: 2\nmain_process_ip: 127.0.0.1\n",
        "2 machines: which one is this? (pass --machine-rank 0, 1, ...)",
    ),
    "a batch that does not divide": (
        "distributed_type: MULTI_GPU\nnum_processes: 5\n",
        "training.batch_size 32 does not divide by 5 processes x 1 micro-batches = 5; nearest that do: 30 or 35",
    ),
    "sizes that do not fill the world": (
        FSDP + "parallelism_config: {parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 2}\n",
        "f.yaml: the sizes of parallelism_config multiply to 4, not to 2 processes",
    ),
    "another model's class": (
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {auto_wrap_policy: TRANSFORMER_BASED_WRAP, "
        "transformer_layer_cls_to_wrap: LlamaDecoderLayer}\n",
        "f.yaml: fsdp_transformer_layer_cls_to_wrap names 'LlamaDecoderLayer', which TransformerLM does not have",
    ),
    "version 3": (
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 3}\n",
        "f.yaml: fsdp_version is 3, and should be one of 1, 2",
    ),
    "a misspelt word": (
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_sharding_strategy: FULLSHARD}\n",
        "should be one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2; did you mean",
    ),
    "no truth": (
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_offload_params: maybe}\n",
        "f.yaml: fsdp_offload_params is 'maybe', and should be true or false",
    ),
    "no number": (
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_min_num_params: 1e8}\n",
        "f.yaml: fsdp_min_num_params is '1e8', and should be a whole number such as 1000000",
    ),
    "nothing to shard over": (
        FSDP + "parallelism_config: {parallelism_config_dp_replicate_size: 2}\n",
        "f.yaml: parallelism_config leaves nothing to shard over",
    ),
    "tensor parallelism": (
        FSDP + "parallelism_config: {parallelism_config_tp_size: 2}\n",
        "parallelism_config tp_size 2 in the accelerate YAML: this loop splits neither a sequence nor a matrix",
    ),
    "checkpointing twice": (
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_activation_checkpointing: true}\n",
        "activation checkpointing is asked for twice",
    ),
}


@pytest.mark.parametrize(("content", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_one_line(content: str | bytes, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("f.yaml").write_bytes(content.encode() if isinstance(content, str) else content)
    twice = ["--set", "model.activation_checkpointing=block"] if "twice" in words else []
    assert words in refused(capsys, "launch", "f.yaml", *twice)
    if "which one is this" not in words and "address of machine 0" not in words:
        assert words in refused(capsys, "launch", "f.yaml", "--print-env", *twice)


def test_a_file_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "launch", "gone.yaml") == "cannot read gone.yaml: No such file or directory"
    Path("folder.yaml").mkdir()
    assert refused(capsys, "launch", "folder.yaml") == (
        "folder.yaml is a folder (name a strategy, or an accelerate YAML file)"
    )
    assert refused(capsys, "launch", "./ddp") == "cannot read ddp: No such file or directory"


def test_several_machines_share_a_run_directory(capsys: pytest.CaptureFixture[str]) -> None:
    Path("f.yaml").write_text(DDP + "num_machines: 2\nmain_process_ip: 127.0.0.1\n")
    line = "2 machines have to share one run directory (name it with --run on each)"
    assert refused(capsys, "launch", "f.yaml", "--machine-rank", "0") == line
    line = "--machine-rank 2 is not one of 0 to 1"
    assert refused(capsys, "launch", "f.yaml", "--machine-rank", "2", "--run", "r") == line
    line = "--machine-rank 1: this launch has one machine (distributed.num_machines)"
    assert refused(capsys, "launch", "ddp", "--machine-rank", "1") == line
    assert run(capsys, "launch", "ddp", "--machine-rank", "0", "--dry-run")[0] == 0


def test_one_process_stays_one(capsys: pytest.CaptureFixture[str]) -> None:
    Path("f.yaml").write_text(NO + "num_processes: 8\n")
    line = "--num-processes 2: f.yaml is of distributed_type 'NO', one process"
    assert refused(capsys, "launch", "f.yaml", "--num-processes", "2") == line
    code, out, err = run(capsys, "launch", "f.yaml", "--dry-run")
    assert (code, err) == (0, "f.yaml: distributed_type 'NO' runs one process, num_processes 8 is ignored\n")
    assert "--main_process_port" not in out
    assert find_target("f.yaml", None, (), 1, own_loop=True).spec.num_processes == 1


@pytest.mark.parametrize(
    "entry", ["fsdp.version=1", "distributed.processes_per_machine=4", "distributed.main_process_port=1234"]
)
def test_a_key_that_the_file_decides_is_not_set(entry: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("f.yaml").write_text(FSDP)
    key = entry.partition("=")[0]
    line = f"--set {key}: is decided by f.yaml (edit the file, or launch a strategy)"
    assert refused(capsys, "launch", "f.yaml", "--set", entry, "--set", "training.lr=1") == line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["fsdp_cpu_offload", "--set", "fsdp.cpu_offload=false"],
            "--set fsdp.cpu_offload=false: fsdp_cpu_offload means fsdp.cpu_offload=true "
            "(choose another strategy; `fsdp` takes every key of the fsdp section as it is)",
        ),
        (
            ["fsdp_hybrid_shard", "--num-processes", "2"],
            "fsdp_hybrid_shard needs more than 1 x 2 processes (machines x processes on each): 1 x 4 "
            "(leave --num-processes out, or set distributed.num_machines)",
        ),
        (
            ["fsdp", "--", "gone.py"],
            "gone.py is not a file (what stands after -- is a script's path, or -m and a module)",
        ),
        (
            ["fsdp", "--dry-run", "--", "."],
            ". is not a file (what stands after -- is a script's path, or -m and a modul",
        ),
        (["fsdp", "--", "-m"], "-m names no module"),
        (["fsdp", "--dry-run", "--", "-m"], "-m names no module"),
        (
            ["fsdp", "--run", "r", "--", "s.py"],
            "--run, --fresh and --stop-at belong to the training loop, not to a script",
        ),
        (
            ["fsdp", "--fresh", "--", "s.py"],
            "--run, --fresh and --stop-at belong to the training loop, not to a script",
        ),
        (["fsdp", "--print-env", "--", "s.py"], "--print-env is about the training loop (leave the script out)"),
        (["single", "--num-processes", "2"], "--num-processes 2: single is one process (use ddp or fsdp)"),
        (["fsdp", "--set", "distributed.mixed_precision=fp16"], "distributed.mixed_precision is 'fp16'"),
        (["fsdp", "--", ""], "an empty name is no script"),
        (["fsdp", "--", "-m", "--lr"], "-m names no module"),
        (
            ["ddp", "--set", "training.steps=3", "--", __file__],
            "--set training.steps belongs to the training loop, not to a script of yours",
        ),
        (["nothing"], "unknown strategy 'nothing'"),
    ],
)
def test_a_wrong_command_is_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.py").write_text("")
    assert line in refused(capsys, "launch", *arguments)


@pytest.mark.parametrize("verb", ["config", "prepare"])
def test_a_script_belongs_to_launch(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, verb, "--", "s.py") == f"{verb} takes nothing after -- (see accel-parallel {verb} --help)"
    assert not list(Path().iterdir())


# --- What is found ---------------------------------------------------------------------------------------------------


def test_the_strategies_of_the_help_are_the_catalogue() -> None:
    listed = LAUNCH_EPILOG.partition("\n\n")[0]
    names = re.findall(r"(?<=  )(single|ddp|fsdp\w*)", listed)
    assert names == list(STRATEGIES)
    for strategy in CATALOGUE[:3]:
        match = re.search(rf"^  {strategy.name}  +(.+)$", listed, re.MULTILINE)
        assert match is not None
        assert strategy.summary.startswith(match[1])


def test_a_strategy_is_not_a_file_of_its_name() -> None:
    """A folder may hold a file or a directory called ddp; `./ddp` names the file."""
    Path("ddp").write_text(FSDP)
    assert find_target("ddp", None, (), None, own_loop=True).environment.get("ACCELERATE_USE_FSDP") is None
    assert find_target("./ddp", None, (), None, own_loop=True).environment["ACCELERATE_USE_FSDP"] == "true"


def test_a_file_without_a_suffix() -> None:
    Path("mine").write_text(FSDP)
    assert find_target("mine", None, (), None, own_loop=True).name == "mine"


def test_a_json_file_is_yaml() -> None:
    Path("f.json").write_text(json.dumps({"distributed_type": "MULTI_GPU", "num_processes": 4}))
    target = find_target("f.json", None, (), None, own_loop=True)
    assert (target.name, target.spec.num_processes) == ("f", 4)


@pytest.mark.parametrize("kind", ["NO", "'NO'", '"NO"'])
def test_an_unquoted_no_is_a_type(kind: str) -> None:
    Path("f.yaml").write_text(f"distributed_type: {kind}\nnum_processes: 1\nmixed_precision: bf16\n")
    target = find_target("f.yaml", None, (), None, own_loop=True)
    assert (target.spec.num_processes, target.spec.distributed.mixed_precision) == (1, "bf16")


def test_the_file_decides_and_the_specification_gives_the_rest() -> None:
    Path("spec.yaml").write_text("training: {batch_size: 24}\nfsdp: {version: 1}\ndistributed: {timeout_minutes: 7}\n")
    Path("f.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 6\nnum_machines: 2\nmain_process_ip: host\nmain_process_port: 0\n"
        "mixed_precision: 'no'\nfsdp_config: {version: 2, reshard_after_forward: false, offload_params: true}\n"
    )
    target = find_target("f.yaml", Path("spec.yaml"), ("training.lr=5e-4",), None, own_loop=True)
    spec = target.spec
    assert (spec.training.batch_size, spec.training.lr, spec.distributed.timeout_minutes) == (24, 5e-4, 7)
    assert (spec.distributed.num_machines, spec.distributed.processes_per_machine) == (2, 3)
    assert (spec.distributed.main_process_ip, spec.distributed.main_process_port) == ("host", None)
    assert spec.distributed.mixed_precision == "no"
    assert (spec.fsdp.version, spec.fsdp.sharding_strategy, spec.fsdp.cpu_offload) == (2, "SHARD_GRAD_OP", True)
    assert target.config == Path("f.yaml").read_text()
    assert target.launcher_arguments == ()


def test_num_processes_wins_over_the_file() -> None:
    Path("f.yaml").write_text("distributed_type: MULTI_GPU\nnum_machines: 2\nmain_process_ip: host\n")
    target = find_target("f.yaml", None, (), 4, own_loop=True)
    assert target.spec.num_processes == 8
    assert target.launcher_arguments == ("--num_processes", "8")


def test_a_script_has_a_batch_of_its_own() -> None:
    for target in ("ddp", "f.yaml"):
        Path("f.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 3\n")
        sets = ("distributed.processes_per_machine=3",) if target == "ddp" else ()
        assert find_target(target, None, sets, None, own_loop=False).spec.num_processes == 3


@pytest.mark.parametrize(
    ("target", "sets", "policy"),
    [
        ("fsdp", (), {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}),
        ("fsdp", ("fsdp.wrap=none",), {"fsdp_auto_wrap_policy": "NO_WRAP"}),
        (
            "fsdp1_full_shard",
            ("fsdp.min_num_params=7",),
            {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 7},
        ),
    ],
)
def test_a_script_has_classes_of_its_own(target: str, sets: tuple[str, ...], policy: dict[str, object]) -> None:
    """The strategy's file for a script names neither our block nor its size."""
    found = find_target(target, None, sets, None, own_loop=False)
    section = loads(found.config)["fsdp_config"]
    wrap = ("fsdp_auto_wrap_policy", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap")
    assert {key: value for key, value in section.items() if key in wrap} == policy
    assert "TransformerBlock" not in found.config
    assert "1,045,120" not in found.config


def test_a_script_runs_under_what_the_loop_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.py").write_text("")
    Path("f.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: fp16\n")
    code, out, err = run(capsys, "launch", "f.yaml", "--dry-run", "--cpu", "--", "s.py", "--lr", "1", "--", "a b")
    assert (code, err) == (0, "")
    assert "exports" not in out
    worker = accelerate_takes(out.splitlines()[-1])
    assert worker == ["accel_parallel.train.script", "--cpu", "s.py", "--lr", "1", "--", "a b"]
    _, out, _ = run(capsys, "launch", "fsdp", "--dry-run", "--keep-precision", "--", "-m", "my.module", "x")
    worker = accelerate_takes(out.splitlines()[-1])
    assert worker == ["accel_parallel.train.script", "--keep-precision", "--module", "my.module", "x"]


# --- --dry-run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", CATALOGUE, ids=lambda strategy: strategy.name)
def test_dry_run_prints_file_environment_and_command(strategy: Strategy, capsys: pytest.CaptureFixture[str]) -> None:
    several = ["--set", "distributed.main_process_ip=127.0.0.1", "--machine-rank", "1"]
    options = several if strategy.min_machines > 1 else []
    code, out, err = run(capsys, "launch", strategy.name, "--dry-run", "--stop-at", "3", *options)
    assert code == 0
    assert ("needs more than" in err) == (strategy.min_processes > 2)
    file, exported, command = (
        out.split("\n\n# what Accelerate's launcher exports to each process, besides its rank\n")[0],
        *out.split("besides its rank\n")[1].split("\n\n"),
    )
    target = find_target(strategy.name, None, tuple(options[1:2]), None, own_loop=True)
    assert file == f"# runs/{strategy.name}-NNN/accelerate.yaml\n{target.config.rstrip()}"
    assert dict(line.split("=", 1) for line in exported.splitlines()) == target.environment
    run_directory = f"runs/{strategy.name}-NNN"
    assert accelerate_takes(command) == [
        *("accel_parallel.train", "--spec", f"{run_directory}/spec.yaml", "--run", run_directory, "--stop-at", "3")
    ]
    assert ("--machine_rank 1" in command) == bool(options)
    assert not list(Path().iterdir()), "nothing is written"


def test_dry_run_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my file.yaml").write_text(FSDP)
    code, out, _ = run(capsys, "launch", "my file.yaml", "--dry-run", "--num-processes", "4", "--run", "my run")
    assert code == 0
    command = out.splitlines()[-1]
    arguments = shlex.split(command)
    assert arguments[2:6] == ["--config_file", "my run/accelerate.yaml", "--num_processes", "4"]
    assert accelerate_takes(command)[1:] == ["--spec", "my run/spec.yaml", "--run", "my run"]
    assert [path.name for path in Path().iterdir()] == ["my file.yaml"]


def test_dry_run_says_that_a_port_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        Path("f.yaml").write_text(f"{DDP}main_process_port: {port}\n")
        _, out, _ = run(capsys, "launch", "f.yaml", "--dry-run")
    note, command = out.splitlines()[-2:]
    match = re.fullmatch(rf"# port {port} is in use: port (\d+) is used instead", note)
    assert match is not None
    assert f"--main_process_port {match[1]} " in command


def test_dry_run_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "launch", "single", "--dry-run", "--json")
    content = json.loads(out)
    assert (code, content["ok"]) == (0, True)
    assert content["data"]["config"].startswith("# single: one process on one device\n")
    assert content["data"]["environment"]["ACCELERATE_USE_CPU"] == "False"
    assert accelerate_takes(content["data"]["command"])[0] == "accel_parallel.train"


# --- --print-env -----------------------------------------------------------------------------------------------------

STALE = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_MIXED_PRECISION": "fp16",
    "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
    "FSDP_VERSION": "1",
    "FSDP_AUTO_WRAP_POLICY": "NO_WRAP",
    "PARALLELISM_CONFIG_TP_SIZE": "8",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "RANK": "3",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "ROLE_NAME": "default",
    "MASTER_ADDR": "elsewhere",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "none",
    "ACCEL_PARALLEL_NUM_PROCESSES": "16",
}
INNOCENT = {"ACCELERATE_TORCH_DEVICE": "cpu", "RANKING": "1", "MY_FSDP_": "x", "PS4": "+ ", "FSDP_;touch hit;": "y"}


def evaluated(lines: str, shell: dict[str, str]) -> dict[str, str]:
    """The environment after `eval` of these lines in a real bash that has `shell` in its own."""
    program = 'eval "$LINES_TO_EVAL" || exit 1; exec env -0'
    result = subprocess.run(
        ["bash", "-uc", program], env={**shell, "LINES_TO_EVAL": lines, "PATH": os.environ["PATH"]},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert result.stderr == ""
    found = dict(entry.split("=", 1) for entry in result.stdout.split("\0") if entry)
    return {key: value for key, value in found.items() if key not in ("PATH", "PWD", "SHLVL", "_", "LINES_TO_EVAL")}


@pytest.fixture(params=[{}, STALE], ids=["clean shell", "stale shell"])
def shell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    variables = {**request.param, **INNOCENT}
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    return variables


def launcher_exports(text: str) -> dict[str, str]:
    """By Accelerate's real launcher; without where the processes meet and their threads, which torchrun decides."""
    exported = launcher_environment(text)
    return {key: value for key, value in exported.items() if not key.startswith(("MASTER_", "OMP_", "KMP_"))}


@pytest.mark.parametrize("strategy", CATALOGUE, ids=lambda strategy: strategy.name)
def test_print_env_is_what_the_launcher_exports(
    strategy: Strategy, shell: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    address = "distributed.main_process_ip=127.0.0.1"
    code, out, _ = run(capsys, "launch", strategy.name, "--print-env", "--set", address)
    assert code == 0
    spec = strategy.resolve(read_spec(sets=[address]))
    assert evaluated(out, shell) == {
        **INNOCENT,
        **launcher_exports(render_file(spec, strategy)),
        "ACCEL_PARALLEL_NUM_PROCESSES": str(spec.num_processes),
    }
    assert not Path("hit").exists()


HARD = ['it\'s "quoted"', "two  spaces", "$HOME `touch hit` $(touch hit)", "a\nb", "; touch hit", "\\", "", "ü*?~!"]


@pytest.mark.parametrize("value", HARD)
def test_hard_values_survive_the_shell(value: str, shell: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "distributed_type": "FSDP",
        "num_processes": 2,
        "fsdp_config": {"fsdp_version": 2, "fsdp_transformer_layer_cls_to_wrap": value},
    }
    Path("f.yaml").write_text(json.dumps(config))
    code, out, _ = run(capsys, "launch", "f.yaml", "--print-env")
    assert code == 0
    found = evaluated(out, shell)
    assert found["FSDP_TRANSFORMER_CLS_TO_WRAP"] == value
    assert found == {**INNOCENT, **launcher_exports(json.dumps(config)), "ACCEL_PARALLEL_NUM_PROCESSES": "2"}
    assert not Path("hit").exists()


def test_print_env_says_notes_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "launch", "fsdp_hybrid_shard", "--print-env")
    assert code == 0
    assert err == "fsdp_hybrid_shard needs more than 1 x 2 processes (machines x processes on each): 1 x 4\n"
    assert all(line.startswith("export ") for line in out.splitlines())
    assert "export ACCEL_PARALLEL_NUM_PROCESSES=4\n" in out


def test_traces_of_other_launches_are_the_same_for_both_ways() -> None:
    """What is unset before torchrun is what Accelerate's launcher does not get to see."""
    env = {**STALE, **INNOCENT}
    lines: Sequence[str] = shell_environment({}, env, 2)
    unset = {line.removeprefix("unset ") for line in lines if line.startswith("unset ")}
    assert unset == set(STALE) - {"ACCEL_PARALLEL_NUM_PROCESSES"}
    assert without_traces(env, 2) == {**INNOCENT, "ACCEL_PARALLEL_NUM_PROCESSES": "2"}


def test_what_was_mixed_up_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    Path("spec.yaml").write_text("training:\n  steps: 3\n")
    assert refused(capsys, "launch", "spec.yaml").startswith(
        "spec.yaml is a specification, not an accelerate file (launch a strategy with --spec spec.yaml, or a file"
    )
    Path("ddp.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    assert refused(capsys, "launch", "ddp", "--spec", "ddp.yaml").startswith(
        "ddp.yaml: is an accelerate file, not a specification"
    )
    Path("configs").mkdir()
    assert refused(capsys, "launch", "configs").startswith("configs is a folder (name a strategy")
    assert "a script of yours stands after --" in refused(capsys, "launch", "fsdp", "train.py")
    assert "(see accel-parallel launch --help)" in refused(capsys, "launch", "fsdp", "--batch-size", "8")
