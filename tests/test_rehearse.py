"""Rehearsals: every generated file passes, every planted fault is found in the right words, and the checks can fail."""

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from accel_parallel.cli.target import find_target
from accel_parallel.rehearsal.check import Rehearsal
from accel_parallel.rehearsal.judge import judge
from accel_parallel.rehearsal.junit import to_junit
from accel_parallel.rehearsal.numbers import FLOAT32, comes_back, learns_the_same
from accel_parallel.rehearsal.sharding import Promise, is_sharded, sends_what_it_should
from accel_parallel.rehearsal.text import lines
from accel_parallel.strategies import STRATEGIES
from tests.commands import BIN, command, set_options

# Rows that do not divide by the processes, so that shards are padded.
SMALL = (
    "model.num_layers=2", "model.hidden_dim=32", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_dim=66",
    "model.vocab_size=257", "model.seq_len=16",
)  # fmt: skip
CHECKS = ["asked", "sharded", "same_numbers", "sends", "comes_back"]
FSDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: {machines}
num_processes: {processes}
mixed_precision: 'no'
fsdp_config:
  fsdp_version: {version}
{lines}
"""
BLOCK = "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_transformer_layer_cls_to_wrap: TransformerBlock"


def fsdp(version: int, lines: str, *, machines: int = 1, processes: int = 2, more: str = "") -> str:
    return FSDP.format(version=version, lines=lines, machines=machines, processes=processes) + more


MESH = "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 4\n"
FAULTS = {
    "v1_reshard": (
        fsdp(1, f"  fsdp_reshard_after_forward: SHARD_GRAD_OP\n{BLOCK}"),
        ["fsdp_reshard_after_forward: SHARD_GRAD_OP has no effect: it reaches the environment, and nothing reads it",
         "write fsdp_sharding_strategy: SHARD_GRAD_OP"],
    ),
    "v2_strategy": (
        fsdp(2, f"  fsdp_sharding_strategy: SHARD_GRAD_OP\n{BLOCK}"),
        ["fsdp_sharding_strategy: SHARD_GRAD_OP has no effect", "set fsdp_reshard_after_forward or parallelism_config"],
    ),
    "misspelt": (
        fsdp(2, f"  fsdp_reshard_after_foward: false\n{BLOCK}"),
        ["fsdp_reshard_after_foward: false has no effect: it never leaves the file",
         "did you mean fsdp_reshard_after_forward?"],
    ),
    "threshold": (
        fsdp(1, "  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: 100000000"),
        ["asked for SIZE_BASED_WRAP, but no module reaches the threshold", "lower fsdp.min_num_params"],
    ),
    "class": (
        fsdp(1, BLOCK.replace("TransformerBlock", "LlamaDecoderLayer")),
        ["names 'LlamaDecoderLayer', which TransformerLM does not have (its blocks are TransformerBlock"],
    ),
    "no_policy": (
        fsdp(2, "  fsdp_reshard_after_forward: true"),
        ["has no fsdp_auto_wrap_policy: no layer is wrapped", "name TRANSFORMER_BASED_WRAP"],
    ),
    "multi_cpu": (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n",
        ["under MULTI_CPU Accelerate starts one process of 2"],
    ),
    "seven": (
        fsdp(1, BLOCK, machines=2, processes=7),
        ["num_processes 7 is the total over 2 machines, which cannot share it evenly (nearest that do: 6 or 8)"],
    ),
    "mesh": (
        fsdp(2, BLOCK, processes=4, more=MESH),
        ["the sizes of parallelism_config multiply to 8, not to 4 processes"],
    ),
}  # fmt: skip


# Below a block, whose parameters are few here, and above the embedding, which may be in no unit of its own.
THRESHOLD = "fsdp.min_num_params=9000"


def rehearse(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, what `--json` prints, and standard error."""
    words = [str(BIN / "accel-parallel"), "rehearse", *arguments, "--json", *set_options(SMALL)]
    result = command(words, folder)
    return result.returncode, json.loads(result.stdout), result.stderr


def by_name(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in content["data"]["rehearsals"]}


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("faults")
    for name, (text, _) in FAULTS.items():
        (folder / f"{name}.yaml").write_text(text)
    (folder / "fine.yaml").write_text(fsdp(2, f"  fsdp_reshard_after_forward: false\n{BLOCK}"))
    code, content, stderr = rehearse(
        folder, *(f"{name}.yaml" for name in (*FAULTS, "fine")), "--set", "training.grad_accum_steps=2"
    )
    assert (code, content["ok"], content["data"]["holds"]) == (1, False, False), stderr
    return by_name(content)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(faults: dict[str, dict[str, Any]], name: str) -> None:
    asked = faults[name]["checks"][0]
    assert (asked["name"], asked["holds"], faults[name]["holds"]) == ("asked", False, False)
    told = "\n".join(asked["mismatches"])
    for words in FAULTS[name][1]:
        assert words in told


def test_a_file_of_ones_own_without_a_fault_passes(faults: dict[str, dict[str, Any]]) -> None:
    assert faults["fine"]["holds"], faults["fine"]["checks"]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("all")
    code, content, stderr = rehearse(folder, "--all", "--junit", "report.xml", "--set", THRESHOLD)
    assert code == 0, (stderr, [item["checks"] for item in content["data"]["rehearsals"] if not item["holds"]])
    # Progress only: no warning of torch's, no log of the profiler's.
    assert all(line.startswith(("rehearses ", "trains the reference")) for line in stderr.splitlines()), stderr
    return by_name(content), folder / "report.xml"


def test_every_strategy_passes_every_check(everything: tuple[dict[str, dict[str, Any]], Path]) -> None:
    """Units, shards and collectives are told from the shape by what `explain` uses, and seen in the processes."""
    found, report = everything
    assert list(found) == list(STRATEGIES)
    for item in found.values():
        assert {check["name"]: check["holds"] for check in item["checks"]} == dict.fromkeys(CHECKS, True)
        assert not [key for key in item["facts"]["stations"] if key["dead"] and "." in key["key"]]
    suites = ElementTree.parse(report).getroot()
    assert [(suite.get("name"), suite.get("tests"), suite.get("failures")) for suite in suites] == [
        (name, "5", "0") for name in STRATEGIES
    ]


def test_substitutions_are_shown_and_no_mismatch(everything: tuple[dict[str, dict[str, Any]], Path]) -> None:
    seen = everything[0]["fsdp_cpu_offload"]["facts"]["ranks"][0]["substitutions"]
    assert {"device", "distributed.backend", "fsdp_offload_params"} <= {item["key"] for item in seen}


Seen = tuple[Promise, dict[str, Any]]


@pytest.fixture(scope="module", params=["fsdp", "fsdp1_full_shard", "ddp"])
def seen(everything: tuple[dict[str, dict[str, Any]], Path], request: pytest.FixtureRequest) -> Seen:
    """What a strategy promises, and what its processes told."""
    target = find_target(request.param, None, (*SMALL, THRESHOLD, "training.batch_size=4"), None, own_loop=True)
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "no"}
    promise = Promise.of({**target.environment, **world}, target.spec.model.shape)
    return promise, everything[0][request.param]["facts"]


@pytest.mark.parametrize("key", ["parameters", "gradients", "optimizer_state"])
@pytest.mark.parametrize("more", [-4, 4 * 100])
def test_bytes_that_were_not_promised_are_a_mismatch(seen: Seen, key: str, more: int) -> None:
    promise, facts = seen
    ranks = copy.deepcopy(facts["ranks"])
    assert is_sharded(promise, ranks).holds
    ranks[1]["memory"][key] += more if key != "optimizer_state" or more > 0 else -10_000
    check = is_sharded(promise, ranks)
    assert not check.holds
    assert (
        f"rank 1 holds {ranks[1]['memory'][key]:,} bytes of {key.replace('_', ' ')}; promised: " in check.mismatches[0]
    )


def test_other_units_are_a_mismatch(seen: Seen) -> None:
    promise, facts = seen
    if not promise.units:
        pytest.skip("replicas have no units")
    ranks = copy.deepcopy(facts["ranks"])
    lost = ranks[0]["units"].pop()
    assert f"{lost['name']} should be a unit and is none" in is_sharded(promise, ranks).mismatches
    ranks[0]["units"] += [lost, {"name": "token_emb", "parameters": ["token_emb.weight"], "held": 1}]
    assert "token_emb is a unit and should be none" in is_sharded(promise, ranks).mismatches
    ranks[0]["units"].pop()
    ranks[0]["units"][0]["parameters"] = ["other"]
    assert "unit root holds other; promised: " in "".join(is_sharded(promise, ranks).mismatches)


def test_other_collectives_are_a_mismatch(seen: Seen) -> None:
    promise, facts = seen
    assert sends_what_it_should(promise, facts["ranks"]).holds
    ranks = copy.deepcopy(facts["ranks"])
    ranks[1]["traffic"] = []
    assert "the processes counted different collectives" in sends_what_it_should(promise, ranks).mismatches
    for rank in ranks:
        rank["traffic"] = copy.deepcopy(facts["ranks"][0]["traffic"])
        moved = next(item for item in rank["traffic"] if item["phase"] == "backward")
        moved["tensor_bytes"] += 4
    assert sends_what_it_should(promise, ranks).mismatches[0].startswith(f"{moved['kind']}: promised ")
    for rank in ranks:
        rank["traffic"] = [item for item in facts["ranks"][0]["traffic"] if item["kind"] != moved["kind"]]
    assert not sends_what_it_should(promise, ranks).holds


STEPS = {"1": {"loss": 5.0, "grad_norm": 2.0}, "2": {"loss": 4.0, "grad_norm": 1.0}}


def changed(step: str, **numbers: float) -> dict[str, Any]:
    return {**STEPS, step: {**STEPS[step], **numbers}}


def test_numbers_apart_are_a_mismatch() -> None:
    assert learns_the_same(changed("2", loss=4.0 * (1 + 0.9e-5)), STEPS, FLOAT32).holds
    assert learns_the_same(changed("2", grad_norm=1.0009), STEPS, FLOAT32).holds
    loss = learns_the_same(changed("2", loss=4.0 * (1 + 1.1e-5)), STEPS, FLOAT32)
    assert (loss.holds, "loss at step 2 is 4.000044, of one process 4.000000" in loss.mismatches[0]) == (False, True)
    assert not learns_the_same(changed("2", grad_norm=1.0011), STEPS, FLOAT32).holds
    assert not learns_the_same(changed("1", loss=float("nan")), STEPS, FLOAT32).holds
    assert learns_the_same({"1": STEPS["1"]}, STEPS, FLOAT32).mismatches == ("step 2 was not reached",)
    assert learns_the_same({}, STEPS, FLOAT32).holds is None


def test_a_resumed_step_has_to_be_equal_bit_for_bit() -> None:
    assert comes_back(STEPS, {"2": STEPS["2"]}, [{}]).holds
    assert comes_back(STEPS, {"2": {"loss": 4.000000001, "grad_norm": 1.0}}, [{}]).holds is False
    assert comes_back(STEPS, {}, []).holds is None
    failed = comes_back(STEPS, {}, [{}, {"error": {"message": "out of memory on rank 1"}}])
    assert (failed.holds, failed.mismatches) == (False, ("out of memory on rank 1",))


def judged(facts: Mapping[str, Any]) -> Rehearsal:
    target = find_target("fsdp", None, (*SMALL, THRESHOLD, "training.batch_size=4"), None, own_loop=True)
    return judge("fsdp", target.spec, target.environment, facts, facts["steps"], keep_precision=False)


def test_fewer_processes_than_asked_and_a_failing_rank_are_mismatches(
    everything: tuple[dict[str, dict[str, Any]], Path],
) -> None:
    facts = everything[0]["fsdp"]["facts"]
    assert judged(facts).holds
    assert judged({**facts, "processes_started": 1}).mismatches == ["asked for 2 processes, Accelerate starts 1"]
    failed = [facts["ranks"][0], {"rank": 1, "error": {"message": "out of memory on rank 1", "code": "error"}}]
    rehearsal = judged({**facts, "ranks": failed})
    assert rehearsal.mismatches == ["out of memory on rank 1"]
    assert [check.holds for check in rehearsal.checks] == [False, None, True, None, True]
    refused = judged({**facts, "refused": "Accelerate's launcher refuses it", "ranks": [], "steps": {}})
    assert refused.mismatches == ["Accelerate's launcher refuses it"]


def test_the_report_fits_80_columns_and_says_what_was_not_seen(
    everything: tuple[dict[str, dict[str, Any]], Path],
) -> None:
    facts = everything[0]["fsdp"]["facts"]
    whole, unseen = judged(facts), judged({**facts, "refused": "a" * 30 + " " + "b" * 70, "ranks": [], "steps": {}})
    for shown in ([whole], [whole, unseen]):
        assert max(map(len, lines(shown))) < 80
    assert "fsdp, 2 processes: as asked" in "\n".join(lines([whole]))
    text = " ".join(" ".join(lines([whole, unseen])).split())
    assert "is it sharded? not seen: no process prepared its model" in text
    assert "not as asked: fsdp" in text


def test_junit_holds_mismatches_and_what_was_not_seen() -> None:
    facts = {
        "refused": "a <b> & \x1b[31mred",
        "stations": [],
        "ranks": [],
        "steps": {},
        "steps_resumed": {},
        "resumed": [],
    }
    rehearsal = replace(judged({**facts, "seconds": 1.0, "processes_started": 0}), name="f<1>")
    suite = ElementTree.fromstring(to_junit([rehearsal]).encode())[0]
    assert (suite.get("name"), suite.get("failures"), suite.get("skipped")) == ("f<1>", "1", "4")
    assert suite[0][0].text == "a <b> & [31mred"


def test_a_large_world_is_simulated_and_said_to_be(tmp_path: Path) -> None:
    precision = ("--set", "distributed.mixed_precision=no")
    code, content, _ = rehearse(tmp_path, "fsdp", "--scale", "64", "--set", THRESHOLD, *precision)
    # The same plan in a file of somebody's own.
    (tmp_path / "mine.yaml").write_text(fsdp(2, f"  fsdp_reshard_after_forward: true\n{BLOCK}"))
    item, mine = by_name(content)["fsdp"], by_name(rehearse(tmp_path, "mine.yaml", "--scale", "64")[1])["mine"]
    assert mine["facts"]["traffic"] == item["facts"]["traffic"]
    assert mine["facts"]["memory"]["parameters"] == item["facts"]["memory"]["parameters"]
    assert (code, item["holds"], item["title"]) == (
        0, True, "fsdp, simulated on 64 processes (fake tensors: none of them ran)",
    )  # fmt: skip
    assert (item["facts"]["simulated"], item["facts"]["world_size"]) == (True, 64)
    # 257 rows of 32 numbers over 64 processes: five each, and the last ones have none.
    assert item["facts"]["shard"]["smallest"] < item["facts"]["shard"]["largest"] == item["facts"]["shard"]["this_rank"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "rehearse what? strategies or accelerate YAML files, or --all"),
        (["fsdp", "--all"], "rehearse what?"),
        (["--all", "-n", "2"], "--all has processes of its own for each strategy"),
        (["--all", "--scale", "16"], "--scale says how many processes there are"),
        (
            ["fsdp", "--scale", "12"],
            "--scale 12 is no world of machines with 8 processes each (nearest that can be",
        ),
        (["single", "--scale", "8"], "--scale simulates several processes under DDP or FSDP, not single"),
        (["fsdp", "--junit", "no/such/folder.xml"], "cannot write no/such/folder.xml: there is no folder no/such"),
        (["fspd"], "unknown strategy 'fspd'; did you mean 'fsdp'?"),
        (["nothing.yaml"], "nothing.yaml"),
        (["fsdp", "--set", "model.preset=llama3_8b"], "8,030,261,248 parameters in 2 processes take"),
        (["fsdp", "--set", "training.batch_size=3"], "training.batch_size 3 does not divide by 2 processes"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], said: str) -> None:
    result = command([str(BIN / "accel-parallel"), "rehearse", *arguments], tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_example_for_github_actions_does_what_it_says(tmp_path: Path) -> None:
    """Its own command, on a folder as it expects one."""
    page = (Path(__file__).parent.parent / "docs/rehearse.md").read_text()
    workflow = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    steps = workflow["jobs"]["rehearse"]["steps"]
    install, run = [step["run"] for step in steps if "run" in step]
    assert install.endswith("-e .")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/fine.yaml").write_text(fsdp(2, BLOCK))
    (tmp_path / "configs/typo.yaml").write_text(fsdp(2, f"  fsdp_reshard_after_foward: true\n{BLOCK}"))
    result = command(["bash", "-ec", f"{run} {' '.join(set_options(SMALL))}"], tmp_path)
    assert result.returncode == 1, result.stderr
    (artifact,) = [step["with"]["path"] for step in steps if "upload-artifact" in step.get("uses", "")]
    suites = ElementTree.parse(tmp_path / artifact).getroot()
    assert [(suite.get("name"), suite.get("failures")) for suite in suites] == [("fine", "0"), ("typo", "1")]
