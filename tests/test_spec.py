"""The specification: reading it, refusing it, writing it, and what follows from it."""

import math
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from accel_parallel.errors import SpecError
from accel_parallel.hardware import ACCELERATORS
from accel_parallel.spec import (
    PRESETS,
    Destination,
    RunSpec,
    Training,
    destinations,
    dump_spec,
    find_spec,
    load_spec,
    lr_at,
    read_spec,
)


@pytest.fixture(autouse=True)
def _somewhere_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACCEL_PARALLEL_SPEC", raising=False)


def spec_file(text: str | bytes, path: str = "spec.yaml") -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def problems_of(text: str | bytes = "", **arguments: Any) -> list[str]:
    """Every problem as the line that is shown."""
    with pytest.raises(SpecError) as caught:
        load_spec(spec_file(text), **arguments)
    assert caught.value.exit_code == 2
    lines = [str(problem) for problem in caught.value.problems]
    assert all("\n" not in line and len(line) < 400 for line in lines)
    return lines


# --- Wrong files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("training:\n  lr: fast\n", "spec.yaml:2: training.lr is 'fast': should be a valid number"),
        ("training:\n  lr: -1\n", "spec.yaml:2: training.lr is -1: should be greater than 0"),
        ("training:\n  lr: .nan\n", "spec.yaml:2: training.lr is nan: should be a finite number"),
        ("training:\n  lr: true\n", "spec.yaml:2: training.lr is True: should be a number, not true or false"),
        ("training:\n  steps: 0\n", "spec.yaml:2: training.steps is 0: should be greater than or equal to 1"),
        ("training:\n  steps: 1.5\n", "spec.yaml:2: training.steps is 1.5: should be a valid integer"),
        ("training:\n  steps: many\n", "spec.yaml:2: training.steps is 'many': should be a whole number such as"),
        ("training:\n  steps: yes\n", "spec.yaml:2: training.steps is True: should be a whole number, not true"),
        ("training:\n  steps:\n", "spec.yaml:2: training.steps is None: should be a valid integer"),
        ("training:\n  betas: 0.9\n", "spec.yaml:2: training.betas is 0.9: should be a list such as [a, b]"),
        ("training:\n  betas: [0.9, 1.5]\n", "spec.yaml:2: training.betas is 1.5: should be less than 1"),
        ("training:\n  deterministic: 1\n", "spec.yaml:2: training.deterministic is 1: should be a valid boolean"),
        ("training:\n  bach_size: 8\n", "spec.yaml:2: unknown key training.bach_size; did you mean 'batch_size'?"),
        ("checkpoint:\n  zzz: 8\n", "spec.yaml:2: unknown key checkpoint.zzz; known: every, keep"),
        ("\ntraning: {}\n", "spec.yaml:2: unknown section traning; did you mean 'training'?"),
        ("1: 2\n", "spec.yaml:1: unknown section 1; known: distributed, ddp"),
        ("data: {1: 2}\n", "spec.yaml:1: unknown key data.1; known: recipe"),
        ("training: 3\n", "spec.yaml:1: training is 3: should be a section with keys below it"),
        ("training: [1]\n", "spec.yaml:1: training is [1]: should be a section with keys below it"),
        (
            "distributed:\n  backend: ncll\n",
            "spec.yaml:2: distributed.backend is 'ncll': should be 'auto', 'nccl' or 'gloo'; did you mean 'nccl'?",
        ),
        ("distributed:\n  mixed_precision: yes\n", "distributed.mixed_precision is True: should be 'no' or 'bf16'"),
        ("distributed:\n  mixed_precision: fp16\n", "distributed.mixed_precision is 'fp16': should be 'no' or 'bf16'"),
        ("distributed:\n  main_process_port: 70000\n", "should be less than or equal to 65535"),
        ("distributed:\n  main_process_ip: ''\n", "spec.yaml:2: distributed.main_process_ip is ''"),
        ("fsdp:\n  version: 3\n", "spec.yaml:2: fsdp.version is 3: should be 1 or 2"),
        ("fsdp:\n  sharding_strategy: NO_SHARD\n", "spec.yaml:1: fsdp: NO_SHARD does not exist in FSDP version 2"),
        ("fsdp:\n  dp_replicate: 2\n", "spec.yaml:1: fsdp: dp_replicate belongs to HYBRID_SHARD of version 2"),
        ("model:\n  preset: tinny\n", "unknown preset 'tinny'; one of tiny, 124m, 1b, llama3_8b; did you mean 'tiny'?"),
        ("model:\n  preset: [1]\n", "unknown preset [1]; one of tiny"),
        ("model:\n  num_heads: 7\n", "spec.yaml:1: model: hidden_dim 320 is not a multiple of num_heads 7"),
        ("model:\n  num_heads: 4\n  num_kv_heads: 3\n", "model: num_heads 4 is not a multiple of num_kv_heads 3"),
        ("model:\n  num_heads: 64\n", "model: hidden_dim / num_heads is 5; rotary embeddings need an even head size"),
        ("training:\n  min_lr: 1\n", "spec.yaml:1: training: min_lr 1 is above lr 0.001"),
        ("training:\n  warmup_steps: 500\n", "spec.yaml:1: training: warmup_steps 500 is more than steps 80; lower it"),
        ("hardware:\n  accelerator: h2000\n", "unknown accelerator 'h2000'; one of h200"),
        ("logging:\n  trackers: [wandb]\n", "spec.yaml:2: logging.trackers is 'wandb': should be 'tensorboard'"),
        ("training:\n  lr: 1\n  lr: 2\n", "spec.yaml:3: training.lr is given twice; first in line 2"),
        ("ddp: {}\nddp: {}\n", "spec.yaml:2: ddp is given twice; first in line 1"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_one_line_with_its_place(text: str, line: str) -> None:
    (problem,) = problems_of(text)
    assert line in problem


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("- a\n", "spec.yaml:1: should hold sections such as training:, not a list"),
        ("words\n", "spec.yaml:1: should hold sections such as training:, not a str"),
        ("training: {lr: 1\n", "spec.yaml:2: is not valid YAML: did not find expected ',' or '}'"),
        ("a: b: c\n", "spec.yaml:1: is not valid YAML: mapping values are not allowed in this context"),
        ("a: !!python/object:os.system {}\n", "spec.yaml:1: is not valid YAML: could not determine a constructor"),
        ("---\na: 1\n---\nb: 1\n", "is not valid YAML: but found another document"),
        (b"\xff\xfe\x00\x01", "spec.yaml: is not UTF-8 text"),
        (b"training:\x00", "spec.yaml: is not valid YAML: unacceptable character"),
        (bytes(range(128)), "spec.yaml: is not valid YAML: unacceptable character"),
        ("a: " + "[" * 30, "spec.yaml:1: is not valid YAML: nested too deeply"),
        ("a: " + "[" * 20_000, "spec.yaml:1: is not valid YAML: "),
        ("training: {steps: " + "9" * 5000 + "}\n", "spec.yaml: is not valid YAML: Exceeds the limit"),
        ("training: {lr: 2024-99-99}\n", "spec.yaml: is not valid YAML: month must be in 1..12"),
        ("# " + "x" * 100_000, "spec.yaml: file has 100,002 bytes; a specification has at most 100,000"),
        ("a: &x 1\nb: *x\n", "spec.yaml:2: is not valid YAML: an alias (*name) is used; write the value out"),
    ],
)
def test_a_file_that_is_not_a_specification_is_one_line(text: str | bytes, line: str) -> None:
    (problem,) = problems_of(text)
    assert line in problem


@pytest.mark.parametrize("merge", ["", "<<: "])
def test_a_yaml_bomb_is_refused_at_once(merge: str) -> None:
    lines = ["a0: &a0 {x: 1}" if merge else "a0: &a0 [x]"]
    for level in range(1, 12):
        inner = ", ".join([f"*a{level - 1}"] * 10)
        lines.append(f"a{level}: &a{level} {{<<: [{inner}]}}" if merge else f"a{level}: &a{level} [{inner}]")
    lines.append("data: {recipe: *a11}")
    start = time.perf_counter()
    (problem,) = problems_of("\n".join(lines))
    assert "spec.yaml:2" in problem
    assert time.perf_counter() - start < 2


def test_a_bomb_on_the_command_line_is_refused_too() -> None:
    (problem,) = problems_of(sets=["data.recipe=[&a [x, x], *a]"])
    assert problem == "--set data.recipe: '[&a [x, x], *a]' is not a YAML value"


def test_long_values_are_shortened() -> None:
    (problem,) = problems_of("training: {lr: " + "x" * 50_000 + "}\n")
    assert "..." in problem
    (problem,) = problems_of("logging: {trackers: [" + "x, " * 9_000 + "]}\n")
    assert "logging.trackers is 'x'" in problem
    problems_of("x" * 50_000 + ": 1\n")


def test_all_problems_are_named_at_once() -> None:
    text = "training:\n  lr: fast\n  steps: 0\nfsdp:\n  version: 3\nddp:\n  bucket: 1\ntrainer: {}\ndata: {recipe: 1}\n"
    problems = problems_of(text, sets=["training.seed=x", "nonsense", "checkpoint.keep=0"])
    assert len(problems) == 9
    for word in ("training.lr", "training.steps", "fsdp.version", "ddp.bucket", "trainer", "data.recipe"):
        assert any(word in problem and problem.startswith("spec.yaml:") for problem in problems)
    assert any(problem.startswith("--set training.seed: training.seed is 'x'") for problem in problems)
    assert any(problem.startswith("--set checkpoint.keep: checkpoint.keep is 0") for problem in problems)
    assert any("an override is written section.key=value" in problem for problem in problems)


def test_problems_carry_line_and_file() -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(spec_file("\n\ntraining:\n  # note\n  lr: fast\n"))
    (problem,) = caught.value.problems
    assert (problem.path, problem.line, problem.severity) == ("spec.yaml", 5, "error")


def test_unreadable_file_is_one_line() -> None:
    Path("folder").mkdir()
    with pytest.raises(SpecError, match="folder: cannot read: Is a directory"):
        load_spec(Path("folder"))
    with pytest.raises(SpecError, match="nowhere: cannot read: No such file"):
        load_spec(Path("nowhere"))


# --- Values with more than one spelling -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e6", 10**6), ("20M", 20_000_000), ("64k", 64_000), ("1_000_000", 10**6), ("1.5k", 1_500), ("2B", 2 * 10**9),
        ("'7'", 7), ("1e+3", 1_000), ("3.0", 3), ("9007199254740993", 2**53 + 1), ("'9007199254740993'", 2**53 + 1),
    ],
)  # fmt: skip
def test_counts(written: str, value: int) -> None:
    assert load_spec(spec_file(f"fsdp: {{min_num_params: {written}}}")).fsdp.min_num_params == value
    assert load_spec(sets=[f"fsdp.min_num_params={written}"]).fsdp.min_num_params == value


@pytest.mark.parametrize("written", ["1e-1", "1.5", "0.0001k", "M", "1e999999999", "20MB", "''", "1 2", "0x"])
def test_not_counts(written: str) -> None:
    (problem,) = problems_of(f"fsdp: {{min_num_params: {written}}}")
    assert "fsdp.min_num_params" in problem


@pytest.mark.parametrize("written", ["no", "NO", "'no'", "off", "false"])
def test_unquoted_no_is_a_word_for_mixed_precision(written: str) -> None:
    text = f"distributed: {{mixed_precision: {written}}}"
    if written == "NO":
        assert yaml.safe_load(text) == {"distributed": {"mixed_precision": False}}
    assert load_spec(spec_file(text)).distributed.mixed_precision == "no"


def test_a_real_number_may_be_written_without_a_point() -> None:
    assert load_spec(spec_file("training: {lr: 1e-2, min_lr: 0}")).training.lr == 0.01


# --- Presets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_preset_fills_the_shape(name: str) -> None:
    model = load_spec(spec_file(f"model: {{preset: {name}}}")).model
    assert {key: getattr(model, key) for key in PRESETS[name]} == PRESETS[name]


def test_given_keys_win_over_the_preset() -> None:
    model = load_spec(spec_file("model: {preset: 124m, num_layers: 2, seq_len: null}")).model
    assert (model.num_layers, model.seq_len, model.hidden_dim) == (2, 1024, 768)


def test_without_a_preset_every_missing_key_is_named() -> None:
    problems = problems_of("model: {preset: null, vocab_size: 100}")
    assert len(problems) == 6
    assert "spec.yaml:1: model.num_layers is missing, and no preset is named" in problems


def test_the_specification_names_every_preset() -> None:
    description = {key: text for key, _, text in destinations()}["model.preset"]
    assert all(name in description for name in PRESETS)


def test_tiny_is_shaped_for_the_default_threshold() -> None:
    spec = RunSpec()
    shape, threshold = spec.model.shape, spec.fsdp.min_num_params
    parts = list(shape.parameters().values())
    assert shape.block_parameters == 1_045_120 >= threshold > max(parts)
    assert threshold > 3 * 320 * 832


# --- Where a specification comes from, and what wins ----------------------------------------------------------------


def test_overrides_rise_from_file_over_set_to_strategy() -> None:
    file = spec_file("training: {steps: 11, seed: 11, batch_size: 11}\n")
    draft = read_spec(file, ["training.seed=22", "training.batch_size=22"])
    spec = draft.resolve({"training.batch_size": 33})
    assert (spec.training.steps, spec.training.seed, spec.training.batch_size) == (11, 22, 33)
    assert draft.resolve().training.batch_size == 22
    assert spec.training.lr == RunSpec().training.lr


def test_the_last_set_wins() -> None:
    assert load_spec(sets=["training.seed=1", "training.seed=2"]).training.seed == 2


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("training.lr", "--set training.lr: an override is written section.key=value, for example training.lr=1e-3"),
        ("lr=1", "--set lr=1: an override is written section.key=value, for example training.lr=1e-3"),
        ("a.b.c=1", "--set a.b.c=1: an override is written section.key=value, for example training.lr=1e-3"),
        ("training.lr=[", "--set training.lr: '[' is not a YAML value"),
        ("training.lr=" + "[" * 5000, "is not a YAML value"),
        ("training.stepz=1", "--set training.stepz: unknown key training.stepz; did you mean 'steps'?"),
        (
            "training.warmup_steps=900",
            "--set training.warmup_steps: training: warmup_steps 900 is more than steps 80; lower it",
        ),
        ("training.steps=", "--set training.steps: training.steps is None: should be a valid integer"),
    ],
)
def test_a_wrong_set_is_one_line(entry: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(sets=[entry])
    assert message in str(caught.value)
    assert len(caught.value.problems) == 1


def test_set_below_a_section_that_is_none_in_the_file() -> None:
    assert load_spec(spec_file("training:\n"), sets=["training.seed=7"]).training.seed == 7
    problems = problems_of("training: 3\n", sets=["training.seed=7"])
    assert "--set training.seed=7: training is not a section in the file" in problems


def test_lookup_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_spec() is None
    default = spec_file("", "accelerate_configs/parallelism.yaml")
    assert find_spec() == default
    other = spec_file("", "other.yaml")
    monkeypatch.setenv("ACCEL_PARALLEL_SPEC", str(other))
    assert find_spec() == other
    explicit = spec_file("", "explicit.yaml")
    assert find_spec(explicit) == explicit


def test_a_named_file_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match=r"--spec names 'gone\.yaml', which is not a file"):
        find_spec(Path("gone.yaml"))
    monkeypatch.setenv("ACCEL_PARALLEL_SPEC", "gone.yaml")
    with pytest.raises(SpecError, match=r"\$ACCEL_PARALLEL_SPEC names 'gone\.yaml', which is not a file"):
        find_spec()


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "{}\n", "training:\nfsdp:\n"])
def test_an_empty_file_means_the_defaults(text: str) -> None:
    assert load_spec(spec_file(text)) == RunSpec() == load_spec()


def test_what_a_strategy_decides_is_validated_and_named() -> None:
    with pytest.raises(SpecError, match=r"here: training\.batch_size is 0"):
        read_spec().resolve({"training.batch_size": 0}, "here")


def test_what_follows_from_a_key_follows_from_the_strategy_s_too() -> None:
    assert read_spec().resolve({"fsdp.version": 1}).fsdp.wrap == "size"
    assert read_spec(sets=["fsdp.wrap=none"]).resolve({"fsdp.version": 1}).fsdp.wrap == "none"


# --- Derived quantities ---------------------------------------------------------------------------------------------


def test_frozen() -> None:
    spec = RunSpec()
    with pytest.raises(ValidationError):
        spec.training.lr = 1.0
    with pytest.raises(ValidationError):
        spec.training = Training()


def test_global_batch_is_split_over_processes_and_micro_batches() -> None:
    sets = ["distributed.num_machines=2", "distributed.processes_per_machine=4"]
    spec = load_spec(sets=[*sets, "training.batch_size=64", "training.grad_accum_steps=2"])
    assert (spec.num_processes, spec.tokens_per_step) == (8, 64 * 128)
    assert spec.batch_problem() is None
    assert spec.with_world(1, 2).num_processes == 2


@pytest.mark.parametrize(
    ("batch", "processes", "accumulate", "nearest"),
    [(33, 2, 1, "32 or 34"), (32, 3, 1, "30 or 33"), (2, 8, 1, "8"), (100, 8, 3, "96 or 120"), (47, 4, 4, "32 or 48")],
)
def test_a_batch_that_does_not_divide_names_the_nearest(
    batch: int, processes: int, accumulate: int, nearest: str
) -> None:
    entries = {"distributed.processes_per_machine": processes, "training.grad_accum_steps": accumulate}
    problem = read_spec().resolve({**entries, "training.batch_size": batch}).batch_problem()
    assert problem is not None
    assert problem.endswith(f"= {processes * accumulate}; nearest that do: {nearest}")
    for size in nearest.split(" or "):
        assert read_spec().resolve({**entries, "training.batch_size": int(size)}).batch_problem() is None


def test_learning_rate_by_hand() -> None:
    training = Training(lr=1.0, min_lr=0.2, warmup_steps=4, steps=12)
    # Linear to 1 over 4 steps; then half a cosine over 8, from 1 down to 0.2.
    assert [lr_at(step, training) for step in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert lr_at(6, training) == pytest.approx(0.2 + 0.4 * (1 + math.sqrt(0.5)))
    assert lr_at(8, training) == pytest.approx(0.6)
    assert lr_at(10, training) == pytest.approx(0.2 + 0.4 * (1 - math.sqrt(0.5)))
    assert lr_at(12, training) == pytest.approx(0.2)
    assert lr_at(99, training) == pytest.approx(0.2)


def test_warmup_left_out_follows_the_steps() -> None:
    assert load_spec().training.warmup_steps == 10
    assert load_spec(sets=["training.steps=6"]).training.warmup_steps == 0
    assert load_spec(sets=["training.steps=1e6"]).training.warmup_steps == 1000
    assert load_spec(sets=["training.steps=6", "training.warmup_steps=3"]).training.warmup_steps == 3


def test_learning_rate_without_warmup_or_without_decay() -> None:
    assert lr_at(1, Training(lr=1.0, min_lr=0.0, warmup_steps=0, steps=2)) == pytest.approx(0.5)
    constant = Training(lr=1.0, min_lr=1.0, warmup_steps=0, steps=5)
    assert [lr_at(step, constant) for step in range(1, 6)] == [1.0] * 5
    assert lr_at(5, Training(lr=1.0, min_lr=0.0, warmup_steps=5, steps=5)) == 1.0


def test_identity_is_what_decides_the_numbers() -> None:
    spec = RunSpec()
    same = read_spec().resolve({"fsdp.version": 1, "checkpoint.every": 1, "distributed.num_machines": 2})
    assert spec.identity_differences(same) == []
    other = read_spec().resolve({"training.lr": 0.01, "distributed.mixed_precision": "no"})
    assert spec.identity_differences(other) == [
        "distributed.mixed_precision bf16 -> no",
        "training.lr 0.001 -> 0.01",
    ]


def test_destinations_cover_every_key_and_describe_it() -> None:
    rows = list(destinations())
    assert [key for key, _, _ in rows] == list(RunSpec().flat())
    assert all(text.endswith(".") and len(text) > 10 and "\n" not in text for _, _, text in rows)
    where = {key: destination for key, destination, _ in rows}
    assert where["fsdp.version"] is Destination.YAML
    assert where["ddp.bucket_cap_mb"] is Destination.ACCELERATOR
    assert where["training.lr"] is Destination.OURS


# --- Writing --------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=30)
ADDRESS = st.from_regex(r"[^\s\x00-\x1f\x7f-\x9f\ud800-\udfff]+", fullmatch=True)
TRAPS = ["no", "1e6", "~", "0x1f", "1:30", "null", "a: b", "# c", "2024-01-01", ""]


@st.composite
def specs(draw: st.DrawFn) -> RunSpec:
    """Any valid specification: every key away from its default at times."""
    head, kv, groups = draw(st.integers(1, 64)) * 2, draw(st.integers(1, 8)), draw(st.integers(1, 4))
    version = draw(st.sampled_from([1, 2]))
    sharding = draw(st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", *(["NO_SHARD"] * (version == 1))]))
    replicate = draw(st.none() | st.integers(1, 99)) if version == 2 and sharding == "HYBRID_SHARD" else None
    lr = draw(st.floats(1e-8, 1e3))
    steps = draw(st.integers(1, 10**9))
    size = st.integers(1, 10**7)
    count, flag, fraction = st.integers(1, 10**12), st.booleans(), st.floats(0, 1, exclude_max=True)
    shape = {
        "vocab_size": draw(size), "num_layers": draw(size), "num_heads": kv * groups, "num_kv_heads": kv,
        "hidden_dim": kv * groups * head, "ffn_dim": draw(size), "seq_len": draw(size),
    }  # fmt: skip
    model: dict[str, Any] = draw(
        st.sampled_from([{"preset": None, **shape}, {"preset": "tiny", **shape}, {"preset": "1b"}])
    )
    return RunSpec.model_validate(
        {
            "distributed": {
                "backend": draw(st.sampled_from(["auto", "nccl", "gloo"])),
                "num_machines": draw(count),
                "processes_per_machine": draw(count),
                "mixed_precision": draw(st.sampled_from(["no", "bf16"])),
                "timeout_minutes": draw(count),
                "main_process_ip": draw(st.none() | ADDRESS),
                "main_process_port": draw(st.none() | st.integers(1, 65535)),
            },
            "ddp": {"bucket_cap_mb": draw(count), "gradient_as_bucket_view": draw(flag), "static_graph": draw(flag)},
            "fsdp": {
                "version": version,
                "sharding_strategy": sharding,
                "wrap": draw(st.sampled_from(["block", "size", "none"])),
                "min_num_params": draw(count),
                "cpu_offload": draw(flag),
                "dp_replicate": replicate,
                "cpu_ram_efficient_loading": draw(flag),
                "sync_each_batch": draw(flag),
            },
            "model": {
                **model,
                "rope_theta": draw(st.floats(1e-3, 1e9)),
                "tie_embeddings": draw(flag),
                "loss": draw(st.sampled_from(["chunked", "full"])),
            },
            "data": {
                "recipe": draw(TEXT),
                "text_column": draw(st.none() | TEXT),
                "tokenizer": draw(st.sampled_from(TRAPS)),
                "max_tokens": draw(st.none() | count),
                "val_fraction": draw(st.floats(1e-9, 0.999)),
            },
            "training": {
                "batch_size": draw(count),
                "steps": steps,
                "lr": lr,
                "min_lr": lr * draw(fraction),
                "warmup_steps": draw(st.integers(0, steps)),
                "betas": [draw(fraction), draw(fraction)],
                "max_grad_norm": draw(st.none() | st.floats(1e-6, 1e6)),
            },
            "checkpoint": {"every": draw(st.integers(0, 10**9))},
            "logging": {"trackers": draw(st.sampled_from([[], ["tensorboard"]]))},
            "hardware": {"accelerator": draw(st.sampled_from(sorted(ACCELERATORS)))},
        }
    )  # fmt: skip


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(specs(), st.booleans())
def test_reading_back_what_was_written_gives_the_same(spec: RunSpec, comments: bool) -> None:
    text = dump_spec(spec, comments=comments)
    assert load_spec(spec_file(text)) == spec
    keys = [line for line in text.splitlines() if line.startswith("  ") and not line.lstrip().startswith("#")]
    assert comments or len(keys) == len(spec.flat())


def test_a_value_wider_than_the_page_keeps_its_description() -> None:
    spec = load_spec(sets=[f"data.recipe={'x' * 200}"])
    text = dump_spec(spec, comments=True)
    assert load_spec(spec_file(text)) == spec
    assert f"recipe: {'x' * 200}  # A recipe (a file in data/)" in text


def test_the_file_to_edit_shows_every_key_with_its_description() -> None:
    text = dump_spec(RunSpec(), comments=True)
    assert max(len(line) for line in text.splitlines()) <= 120
    squeezed = " ".join(text.replace("#", " ").split())
    for key, _, description in destinations():
        assert f" {key.partition('.')[2]}: " in squeezed
        assert " ".join(description.replace("#", " ").split()) in squeezed


def test_what_a_preset_decides_is_not_frozen_into_the_file_to_edit() -> None:
    text = dump_spec(load_spec(sets=["model.num_layers=6"]), comments=True)
    kept = {"preset", "num_layers", "activation_checkpointing", "loss", "init_from"}
    assert set(yaml.safe_load(text)["model"]) == kept
    assert "# hidden_dim: 320 " in text
    edited = spec_file(text.replace("preset: tiny ", "preset: 124m "))
    assert (load_spec(edited).model.hidden_dim, load_spec(edited).model.num_layers) == (768, 6)


def test_wrap_follows_the_version_in_the_file_to_edit() -> None:
    text = dump_spec(RunSpec(), comments=True)
    assert load_spec(spec_file(text.replace(" version: 2 ", " version: 1 "))).fsdp.wrap == "size"
    explicit = dump_spec(load_spec(sets=["fsdp.wrap=size"]), comments=True)
    assert yaml.safe_load(explicit)["fsdp"]["wrap"] == "size"
    old = dump_spec(load_spec(sets=["fsdp.version=1", "fsdp.wrap=block"]), comments=True)
    assert yaml.safe_load(old)["fsdp"]["wrap"] == "block"


def test_a_value_stays_on_its_line() -> None:
    spec = read_spec().resolve({"data.recipe": "a\n\nb: 'c'"})
    assert len(dump_spec(spec).splitlines()) == len(dump_spec(RunSpec()).splitlines())


def test_the_file_of_a_run_is_complete() -> None:
    tree = yaml.safe_load(dump_spec(RunSpec()))
    assert {f"{section}.{key}" for section, values in tree.items() for key in values} == set(RunSpec().flat())
