"""Export, generation, and starting from an export: transformers computes what `TransformerLM` computes.

Most runs here are checkpoints written by this process; those of the round trips are trained by real processes.
"""

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_parallel.arguments import size
from accel_parallel.checkpoints import complete_checkpoints
from accel_parallel.errors import AccelParallelError, DataError, RunError, SpecError
from accel_parallel.init_from import check_init_from
from accel_parallel.llama import llama_config, llama_name, our_name, refusals, shape_of
from accel_parallel.output import Output
from accel_parallel.runs import open_run
from accel_parallel.spec import PRESETS, Model, RunSpec, load_spec
from accel_parallel.train import export as export_module
from accel_parallel.train import generate_text
from accel_parallel.train.checkpoint.publish import clear, own_files, partial_of, publish
from accel_parallel.train.data import TrainBatches, prepare
from accel_parallel.train.data.build import find_tokens
from accel_parallel.train.initialize import read_llama
from accel_parallel.train.model import TransformerLM
from accel_parallel.train.saved import open_saved
from accel_parallel.train.state import TrainState
from accel_parallel.verbs import parser
from tests.commands import BIN, command, set_options
from tests.workers import Trained, train

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

SHAPES = {
    "grouped": [],
    "one head of keys, tied": ["model.num_kv_heads=1", "model.tie_embeddings=true"],
    "all heads, untied": ["model.num_kv_heads=4", "model.tie_embeddings=false"],
    "odd theta": ["model.rope_theta=777.5", "model.tie_embeddings=false"],
    "large eps": ["model.norm_eps=0.05", "model.hidden_dim=48", "model.num_heads=6", "model.num_kv_heads=3"],
}


def silent(text: str) -> None: ...


def lively(spec: RunSpec) -> TransformerLM:
    """A model in which every part shows: large weights, uneven norms, rows of no token among them."""
    model = TransformerLM(spec.model).eval()
    model.init_weights(3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            uneven = torch.rand(parameter.shape, generator=generator) + 0.5
            parameter.mul_(5.0 if parameter.dim() == 2 else uneven)
    return model


def make_run(run: Path, spec: RunSpec, *steps: int) -> Path:
    """A run directory with checkpoints of a model that nobody trained."""
    from torch.distributed.checkpoint.state_dict_saver import save

    open_run(spec, "single", explicit=run)
    data = prepare(spec.data, spec.model.vocab_size, say=silent)
    dumped = spec.model_dump(mode="json", by_alias=True)
    about = {"strategy": "single", "world_size": 1, "data": data.fingerprint, "spec": dumped}
    for step in steps:
        partial = partial_of(run / f"checkpoints/step-{step:08d}")
        clear(partial)
        save({"model": lively(spec).state_dict()}, checkpoint_id=partial, no_dist=True)
        publish(partial, own_files(partial, 0), TrainState(step=step), about=about, keep=9)
    return run


def export(run: Path, to: Path, *, dtype: str = "float32", max_shard: str = "5GB", step: int | None = None) -> Path:
    saved = open_saved(run, step, silent)
    export_module.export(saved, export_module.check_target(to), dtype, size(max_shard), silent)
    return to


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = safetensors.load_file(path)
        assert not found.keys() & part.keys()
        found |= part
    return found


def generating(run: Path, *words: str) -> argparse.Namespace:
    return parser("generate_text", generate_text.add_arguments).parse_args([str(run), *words])


@pytest.fixture(scope="module")
def spec(toy: list[str]) -> RunSpec:
    """With more rows of the embedding than the tokenizer has tokens."""
    return load_spec(None, [*toy, "data.max_tokens=2500", "model.vocab_size=1000"])


@pytest.fixture(scope="module")
def run(spec: RunSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of equal weights."""
    return make_run(tmp_path_factory.mktemp("export") / "run", spec, 5, 10)


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(run, tmp_path_factory.mktemp("exported") / "hf")


# --- Names and config ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_names_are_those_of_llama_both_ways(tied: bool) -> None:
    model = Model.model_validate({"tie_embeddings": tied})
    with torch.device("meta"):
        ours = list(TransformerLM(model).state_dict())
        config = transformers.LlamaConfig(**llama_config(model, 0, "float32"))
        theirs = transformers.LlamaForCausalLM(config).state_dict()
    assert {llama_name(name) for name in ours} == set(theirs)
    assert [our_name(llama_name(name)) for name in ours] == ours
    assert our_name("model.layers.0.self_attn.q_proj.bias") is None
    assert our_name("model.layers.0.self_attn.other.weight") is None
    with pytest.raises(KeyError):
        llama_name("blocks.0.attn.other.weight")


@pytest.mark.parametrize("preset", PRESETS)
def test_config_json_and_back(preset: str) -> None:
    model = Model.model_validate({"preset": preset, "norm_eps": 2e-5})
    config = llama_config(model, 7, "bfloat16")
    assert shape_of(config) == {key: getattr(model, key) for key in PRESETS[preset]}
    assert refusals(config) == []
    known = transformers.LlamaConfig(**config)
    assert (known.eos_token_id, known.bos_token_id, known.dtype) == (7, None, torch.bfloat16)
    rewritten = json.loads(known.to_json_string(use_diff=False))
    assert "rope_theta" not in rewritten or rewritten["rope_theta"] == model.rope_theta
    assert shape_of(rewritten) == shape_of(config)
    assert refusals(rewritten) == []


def test_what_a_config_leaves_out_is_what_llama_takes() -> None:
    left = {"num_key_value_heads", "max_position_embeddings", "rope_theta", "rms_norm_eps", "tie_word_embeddings"}
    given = {key: value for key, value in llama_config(RunSpec().model, 0, "float32").items() if key not in left}
    filled = json.loads(transformers.LlamaConfig(**{key: given[key] for key in given}).to_json_string(use_diff=False))
    assert shape_of(given) == shape_of(filled)


# --- The exported folder ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sets", SHAPES.values(), ids=SHAPES)
def test_transformers_computes_the_same_logits(sets: list[str], toy: list[str], tmp_path: Path) -> None:
    spec = load_spec(None, [*toy, "data.max_tokens=2500", *sets])
    run = make_run(tmp_path / "run", spec, 1)
    folder = export(run, tmp_path / "hf")
    llama = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(llama).__name__ == "LlamaForCausalLM"
    assert llama.dtype == torch.float32
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, spec.model.vocab_size, (2, spec.model.seq_len), generator=generator)
    with torch.no_grad():
        ours, theirs = lively(spec)(tokens), llama(tokens).logits
    assert ours.std() > 0.3
    assert (ours - theirs).abs().max() < 1e-5
    assert ("lm_head.weight" in tensors_of(folder)) is not spec.model.tie_embeddings
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is spec.model.tie_embeddings


def test_the_tokenizer_goes_along(exported: Path, spec: RunSpec) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    data = prepare(spec.data, spec.model.vocab_size, say=silent)
    text = "the loop reads 17 tokens.\n\té€ every rank"
    assert tokenizer(text)["input_ids"] == data.encode(text)
    assert tokenizer.decode(data.encode(text)) == text
    assert tokenizer.eos_token_id == data.end_of_text
    llama = transformers.AutoModelForCausalLM.from_pretrained(exported)
    assert llama.generation_config.eos_token_id == data.end_of_text
    ids = tokenizer("the loop", return_tensors="pt")
    made = llama.generate(**ids, max_new_tokens=12, do_sample=False)
    plain = llama.generate(**ids, max_new_tokens=12, do_sample=False, use_cache=False)
    assert made.tolist() == plain.tolist()
    assert made.shape[1] > ids["input_ids"].shape[1]


def test_many_files_hold_the_same_tensors(run: Path, exported: Path, tmp_path: Path) -> None:
    folder = export(run, tmp_path / "hf", max_shard="20KB")
    whole, parts = tensors_of(exported), tensors_of(folder)
    assert list(exported.glob("*.safetensors")) == [exported / "model.safetensors"]
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 3
    assert [path.name for path in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    for path in files:
        assert path.stat().st_size < 22_000 or len(safetensors.load_file(path)) == 1
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == whole.keys() == parts.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    llama = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(whole[name], tensor) for name, tensor in llama.state_dict().items() if name in whole)


def test_bfloat16_is_the_float32_rounded(run: Path, exported: Path, tmp_path: Path) -> None:
    folder = export(run, tmp_path / "hf", dtype="bfloat16")
    halves = tensors_of(folder)
    assert all(torch.equal(halves[name], whole.bfloat16()) for name, whole in tensors_of(exported).items())
    assert transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16


def test_one_tensor_is_held_at_a_time(run: Path, tmp_path: Path) -> None:
    saved = open_saved(run, None, silent)
    read, alive, most = saved.reader(), weakref.WeakSet[torch.Tensor](), 0

    def watched(name: str) -> torch.Tensor:
        nonlocal most
        tensor = read(name)
        alive.add(tensor)
        most = max(most, len(alive))
        return tensor

    export_module.write_safetensors(tmp_path / "model.safetensors", saved.sizes(), "float32", watched)
    assert most == 1
    assert len(safetensors.load_file(tmp_path / "model.safetensors")) == len(saved.sizes())


# --- What stands in the way of an export -----------------------------------------------------------------------------


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(AccelParallelError) as error:
        action()
    assert error.value.exit_code == 2
    text = str(error.value)
    assert len(text.splitlines()) == 1
    return text


def test_a_run_that_is_not_there(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "runs/fsdp-001 is not a run directory" in refused(lambda: open_saved(Path("runs/fsdp-001"), None, silent))
    open_run(RunSpec(), "fsdp", explicit=Path("runs/fsdp-001"))
    assert "did you mean 'runs/fsdp-001'" in refused(lambda: open_saved(Path("runs/fsdp-01"), None, silent))
    assert "runs/fsdp-001 has no complete checkpoint" in refused(
        lambda: open_saved(Path("runs/fsdp-001"), None, silent)
    )
    assert "has no checkpoint of step 7 (it has 10, 5)" in refused(lambda: open_saved(run, 7, silent))


def test_the_newest_intact_checkpoint_is_taken(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    assert open_saved(copy, None, silent).manifest.state.step == 10
    assert open_saved(copy, 5, silent).manifest.state.step == 5
    shard = next((copy / "checkpoints/step-00000010").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    lines: list[str] = []
    assert open_saved(copy, None, lines.append).manifest.state.step == 5
    assert len(lines) == 1
    assert "step-00000010 is not used: " in lines[0]
    assert "its digest differs" in lines[0]
    assert "step-00000010 is damaged: " in refused(lambda: open_saved(copy, 10, silent))
    spec_file = copy / "spec.yaml"
    spec_file.write_text(spec_file.read_text().replace("verify: true", "verify: false"))
    assert open_saved(copy, None, silent).manifest.state.step == 10


def test_a_checkpoint_without_a_parameter_is_damaged(run: Path, tmp_path: Path) -> None:
    """Of another shape than its manifest says."""
    saved = open_saved(run, None, silent)
    spec = {**saved.manifest.spec, "model": {**saved.manifest.spec["model"], "num_layers": 4}}
    other = type(saved)(saved.run, saved.path, saved.manifest.model_copy(update={"spec": spec}))
    read = other.reader()
    assert read("norm.weight").shape == (32,)
    assert "is damaged: it holds no blocks.3.attn_norm.weight" in refused(lambda: read("blocks.3.attn_norm.weight"))
    unknown = {**spec, "model": {**spec["model"], "experts": 8}}
    later = type(saved)(saved.run, saved.path, saved.manifest.model_copy(update={"spec": unknown}))
    assert "saved by another version: model.experts" in refused(later.sizes)


def test_ctrl_c_while_reading_is_ctrl_c(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch wraps what is raised while it reads."""
    from accel_parallel.train.checkpoint.reader import DataReader

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    read = open_saved(run, None, silent).reader()
    monkeypatch.setattr(DataReader, "read_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read("norm.weight")


def test_nothing_is_overwritten(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter").write_text("years of work")
    assert "thesis is not empty" in refused(lambda: export_module.check_target(tmp_path / "thesis"))
    assert "chapter is a file" in refused(lambda: export_module.check_target(tmp_path / "thesis/chapter"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert ". is the current folder" in refused(lambda: export_module.check_target(Path()))
    monkeypatch.chdir(tmp_path)
    folder = export(run, Path("here"))  # empty
    assert (folder / "config.json").exists()


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit, OSError(28, "No space left on device")])
def test_what_ends_half_way_leaves_nothing(
    ending: Any, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: Any) -> None:
        assert [path.name.startswith(".hf.") for path in tmp_path.iterdir()] == [True], "hidden until it is complete"
        raise ending

    monkeypatch.setattr(export_module, "write_safetensors", end)
    with pytest.raises(RunError if isinstance(ending, OSError) else ending) as error:
        export(run, tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []
    if isinstance(ending, OSError):
        assert "hf: No space left on device; 0.2 MiB are needed" in str(error.value)


def test_a_tokenizer_that_is_gone(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_PARALLEL_CACHE", str(tmp_path / "other"))
    text = refused(lambda: export(run, tmp_path / "hf"))
    assert f"the tokenizer of {run} is not in the cache" in text
    assert f"accel-parallel prepare --spec {run}/spec.yaml" in text


def test_the_tokenizer_is_found_when_the_text_has_changed(spec: RunSpec, corpus: Path, tmp_path: Path) -> None:
    """By what was trained on, and not by what the specification would give now."""
    text = Path(shutil.copytree(corpus, tmp_path / "text"))
    moved = spec.model_copy(update={"data": spec.data.model_copy(update={"recipe": str(text), "max_tokens": 2600})})
    run = make_run(tmp_path / "run", moved, 1)
    shutil.rmtree(text)
    assert (export(run, tmp_path / "hf") / "tokenizer.json").exists()


def test_tokens_are_found_by_what_they_are(spec: RunSpec) -> None:
    for made in (prepare(spec.data, 1000, say=silent), prepare(spec.data, 320, say=silent)):
        found = find_tokens(made.fingerprint, "byte_bpe")
        assert found is not None
        assert found.fingerprint == made.fingerprint
        assert find_tokens(made.fingerprint, "another") is None


# --- The commands ----------------------------------------------------------------------------------------------------


def test_the_commands_of_the_readme(run: Path, exported: Path, tmp_path: Path) -> None:
    done = command([str(BIN / "accel-parallel"), "export", str(run), "--to", "hf", "--json"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert (answer["command"], answer["ok"], answer["problems"]) == ("export", True, [])
    assert answer["data"]["step"] == 10
    assert (tmp_path / "hf/model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
    assert (tmp_path / "hf").stat().st_mode & 0o777 == 0o777 & ~current_umask()
    greedy = [str(BIN / "accel-parallel"), "generate", str(run), "--prompt", "the loop", "--max-new-tokens", "8"]
    shown = command(greedy, tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("the loop")
    assert len(shown.stdout) > len("the loop") + 3


def current_umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


def test_a_full_disk_is_one_line(run: Path, tmp_path: Path) -> None:
    """A file may not grow as far as the weights need; the tokenizer's fits."""
    result = subprocess.run(
        [sys.executable, "-m", "accel_parallel", "export", str(run), "--to", "hf"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: cannot write ")
    assert len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ended_while_the_child_imports(number: signal.Signals, code: int, run: Path, tmp_path: Path) -> None:
    """As a terminal does it, to both processes; the verb's own start is over when there is a child."""
    verb = [sys.executable, "-m", "accel_parallel", "export", str(run), "--to", "hf"]
    process = subprocess.Popen(
        verb, cwd=tmp_path, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 60
    while not children.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # until the verb waits for it
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (code, "", "error: interrupted\n" if number == signal.SIGINT else "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "r", "--to", "d", "--dtype", "float16"], "argument --dtype: invalid choice: 'float16'"),
        (["export", "r"], "the following arguments are required: --to"),
        (["export", "r", "--to", "d", "--max-shard-size", "big"], "'big' is not a size such as 5GB or 500MB"),
        (["export", "r", "--to", "d", "--step", "0"], "'0' is not a whole number from 1 on"),
        (["export", "nowhere", "--to", "d"], "nowhere is not a run directory"),
        (["generate", "r", "--prompt", ""], "argument --prompt: is empty"),
        (["generate", "r", "--prompt", "x", "--temperature", "0"], "'0' is not a number above 0"),
        (["generate", "r", "--prompt", "x", "--seed", "-1"], "'-1' is not a whole number from 0"),
        (["generate", "nowhere", "--prompt", "x"], "nowhere is not a run directory"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    result = command([str(BIN / "accel-parallel"), *words], tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert message in result.stderr


@pytest.mark.parametrize(
    ("text", "number"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19), ("700", 700), ("20kb", 20_000)]
)
def test_sizes(text: str, number: int) -> None:
    assert size(text) == number


# --- Generation ------------------------------------------------------------------------------------------------------


def test_generation_of_a_run_and_of_its_export_agree(
    run: Path, exported: Path, spec: RunSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    output = Output("generate", False)
    words = ["--prompt", "the loop", "--max-new-tokens", "9"]
    ours = generate_text.from_checkpoint(open_saved(run, None, silent))
    theirs = generate_text.from_folder(exported)
    assert ours.known == theirs.known < spec.model.vocab_size
    ids = generate_text.complete(ours, generating(run, *words), output)
    assert generate_text.complete(theirs, generating(exported, *words), output) == ids
    assert capsys.readouterr().out.count("the loop") == 2
    model, tokens = lively(spec), ours.tokenizer("the loop")["input_ids"]
    with torch.no_grad():
        for token in ids:  # one by one, without a cache
            assert int(model(torch.tensor([tokens]))[0, -1, : ours.known].argmax()) == token
            tokens.append(token)


def test_drawing_follows_the_seed_and_draws_no_row_without_a_token(run: Path) -> None:
    output = Output("generate", False)
    loaded = generate_text.from_checkpoint(open_saved(run, None, silent))
    few = generate_text.Loaded(loaded.model, loaded.tokenizer, 9)

    def drawn(*words: str) -> list[int]:
        arguments = generating(run, "--prompt", "a", "--max-new-tokens", "20", "--json", *words)
        return generate_text.complete(few, arguments, output)

    assert drawn("--temperature", "3", "--seed", "1") == drawn("--temperature", "3", "--seed", "1")
    assert drawn("--temperature", "3", "--seed", "1") != drawn("--temperature", "3", "--seed", "2")
    assert drawn("--top-k", "1") == drawn()
    assert max(drawn("--temperature", "9") + drawn("--temperature", "9", "--seed", "3") + drawn()) < 9


def test_a_prompt_has_to_leave_room(run: Path, spec: RunSpec, capsys: pytest.CaptureFixture[str]) -> None:
    output = Output("generate", True)
    loaded = generate_text.from_checkpoint(open_saved(run, None, silent))
    with pytest.raises(DataError, match=r"--prompt has \d+ tokens, the model was trained on sequences of 32"):
        generate_text.complete(loaded, generating(run, "--prompt", "q" * 200, "--json"), output)
    made = generate_text.complete(loaded, generating(run, "--prompt", "q", "--json"), output)
    assert len(made) <= 31
    assert "at most 31 new tokens" in capsys.readouterr().err


# --- Starting from an export -----------------------------------------------------------------------------------------

STILL = ["training.lr=1e-30", "training.min_lr=1e-30", "training.warmup_steps=0", "training.weight_decay=0"]
"""A step that changes no bit of the weights: they are above 1e-20 and the step is below."""


@pytest.mark.parametrize(
    ("strategy", "world_size", "tied"),
    [("ddp", 2, False), ("fsdp", 2, True), pytest.param("fsdp", 2, False, marks=pytest.mark.slow)],
)
def test_train_export_start_from_it_export(
    strategy: str, world_size: int, tied: bool, toy: list[str], tmp_path: Path
) -> None:
    sets = [*toy, "data.max_tokens=2500", f"model.tie_embeddings={str(tied).lower()}", "training.steps=3"]
    first = train(tmp_path / "first", strategy, world_size, [*sets, "training.lr=1e-2"])
    assert set(first.exit_codes) == {0}, first.errors
    once = export(first.run, tmp_path / "once")
    still = [*sets, *STILL, "training.steps=1", f"model.init_from={once}"]
    second = train(tmp_path / "second", strategy, world_size, still)
    assert set(second.exit_codes) == {0}, second.errors
    twice = export(second.run, tmp_path / "twice")
    for name in ("model.safetensors", "tokenizer.json", "generation_config.json", "config.json"):
        assert (twice / name).read_bytes() == (once / name).read_bytes(), name
    assert second.column("loss")[0] == pytest.approx(loss_of(once, load_spec(None, still)), rel=1e-5)


def loss_of(folder: Path, spec: RunSpec) -> float:
    """What transformers' model says about the first batch."""
    llama = transformers.AutoModelForCausalLM.from_pretrained(folder)
    data = prepare(spec.data, spec.model.vocab_size, say=silent)
    ((tokens, labels),) = TrainBatches(data, spec.model.seq_len, spec.training, 0, 1).step(0)
    with torch.no_grad():
        logits = llama(tokens).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def test_a_checkpoint_wins_over_the_folder(toy: list[str], exported: Path, tmp_path: Path) -> None:
    """It is not even read, unless no checkpoint turns out to be intact."""
    folder = Path(shutil.copytree(exported, tmp_path / "hf"))
    sets = [*toy, "model.vocab_size=1000", f"model.init_from={folder}", "training.steps=4"]
    straight = train(tmp_path / "straight", "single", 1, sets)
    train(tmp_path / "run", "single", 1, sets, argv=["--stop-at", "2"])
    shutil.rmtree(folder)
    resumed = train(tmp_path / "run", "single", 1, sets)
    assert resumed.exit_codes == [0], resumed.errors
    assert resumed.column("loss") == straight.column("loss")
    for path in complete_checkpoints(resumed.run).values():
        shard = next(path.glob("*.distcp"))
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    again = train(tmp_path / "run", "single", 1, [*sets, "training.steps=5"])
    assert again.exit_codes == [2]
    assert "no checkpoint of" in again.message
    assert "is intact" in again.message


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_folder_without_a_tensor_ends_all_processes(
    strategy: str, toy: list[str], exported: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "hf"))
    tensors = tensors_of(folder)
    del tensors["model.norm.weight"]
    safetensors.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    sets = [*toy, "model.vocab_size=1000", f"model.init_from={folder}"]
    result = train(tmp_path / "run", strategy, 2, sets)
    assert result.exit_codes == [2, 2]
    assert "holds no model.norm.weight" in result.message
    assert not complete_checkpoints(result.run)


def test_the_worker_looks_too(toy: list[str], exported: Path, tmp_path: Path) -> None:
    sets = [*toy, "model.vocab_size=1000", f"model.init_from={exported}", "model.rope_theta=500"]
    result = train(tmp_path / "run", "single", 1, sets)
    assert result.exit_codes == [2]
    assert "model.rope_theta is 500.0, 10000.0 there" in result.message


def warned(result: Trained) -> bool:
    assert result.exit_codes == [0], result.errors
    return "token ids would mean something else" in result.log


def test_another_tokenizer_is_told(toy: list[str], exported: Path, tmp_path: Path) -> None:
    sets = [*toy, "data.max_tokens=2500", "model.vocab_size=1000", f"model.init_from={exported}", "training.steps=3"]
    assert not warned(train(tmp_path / "same", "single", 1, sets)), "it is equal, byte by byte"
    assert not warned(train(tmp_path / "its", "single", 1, [*sets, f"data.tokenizer={exported}"]))
    folder = Path(shutil.copytree(exported, tmp_path / "hf"))
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n")
    assert warned(train(tmp_path / "else", "single", 1, [*sets, f"model.init_from={folder}"]))


# --- Folders that do not fit -----------------------------------------------------------------------------------------


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "hf"))


def model_of(spec: RunSpec, folder: Path, **keys: Any) -> Model:
    return spec.model.model_copy(update={"init_from": str(folder), **keys})


def edit(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def test_a_folder_that_fits(spec: RunSpec, folder: Path) -> None:
    check_init_from(model_of(spec, folder))
    check_init_from(model_of(spec, folder, seq_len=16))


def test_every_key_that_differs_is_told_with_what_fits(spec: RunSpec, folder: Path) -> None:
    model = model_of(spec, folder, num_layers=2, norm_eps=1e-6, seq_len=64, tie_embeddings=False)
    text = refused(lambda: check_init_from(model))
    for words in (
        "model.num_layers is 2, 3 there",
        "model.norm_eps is 1.0e-06, 1.0e-05 there",
        "model.seq_len is 64, at most 32 there",
        "model.tie_embeddings is false, true there",
    ):
        assert words in text
    assert "vocab_size" not in text
    hint = text[text.rindex("(") + 1 : -1].split()
    sets = hint[1::2]
    assert hint[::2] == ["--set"] * len(sets)
    fitted = load_spec(None, [f"model.{key}={value}" for key, value in model.model_dump().items()] + sets).model
    check_init_from(fitted)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model_type": "gpt2"}, "model_type gpt2 instead of llama"),
        ({"attention_bias": True}, "attention_bias true instead of false"),
        ({"mlp_bias": True}, "mlp_bias true instead of false"),
        ({"hidden_act": "gelu"}, "hidden_act gelu instead of silu"),
        ({"head_dim": 16}, "head_dim 16 instead of hidden_size / num_attention_heads, 8.0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling llama3 instead of none"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling linear instead of none"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_scaling yarn instead of none"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config set instead of none"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide', not a whole number"),
        ({"vocab_size": None}, "vocab_size is 'None', not a whole number"),
    ],
)
def test_what_the_model_cannot_represent(keys: dict[str, Any], words: str, spec: RunSpec, folder: Path) -> None:
    edit(folder, **keys)
    assert words in refused(lambda: check_init_from(model_of(spec, folder)))


def test_folders_that_are_none(spec: RunSpec, folder: Path) -> None:
    model = model_of(spec, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "holds neither model.safetensors nor" in refused(lambda: check_init_from(model))
    index = folder / "model.safetensors.index.json"
    (folder.parent / "outside.safetensors").touch()
    for name in ("../outside.safetensors", "gone.safetensors", "pytorch_model.bin"):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        assert f"names '{name}', which is no safetensors file" in refused(lambda: check_init_from(model))
    index.write_text("{}")
    assert "has no weight_map" in refused(lambda: check_init_from(model))
    for text, words in (("{", "is not JSON"), ("[]", "is not a JSON object")):
        (folder / "config.json").write_text(text)
        assert words in refused(lambda: check_init_from(model))
    (folder / "config.json").unlink()
    assert "holds no config.json" in refused(lambda: check_init_from(model))
    assert "is not a folder" in refused(lambda: check_init_from(model_of(spec, folder / "deeper")))


def test_tensors_that_do_not_fit(spec: RunSpec, folder: Path) -> None:
    tensors, file = tensors_of(folder), folder / "model.safetensors"
    model = TransformerLM(spec.model)

    def told(**changed: torch.Tensor) -> str:
        safetensors.save_file({**tensors, **changed}, file, {"format": "pt"})
        return refused(lambda: read_llama(model, folder))

    norm = "model.norm.weight"
    assert f"{norm} is float32 (31,), which does not fill a parameter of (32,)" in told(**{norm: torch.ones(31)})
    assert "is int64 (32,)" in told(**{norm: torch.ones(32, dtype=torch.int64)})
    assert "holds model.layers.3.input_layernorm.weight, which this model does not have" in told(
        **{"model.layers.3.input_layernorm.weight": torch.ones(32)}
    )
    file.write_bytes(file.read_bytes()[:100])
    assert "model.safetensors cannot be read" in refused(lambda: read_llama(model, folder))
    old = {"lm_head.weight": torch.zeros(1000, 32), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    safetensors.save_file({**tensors, **old}, file, {"format": "pt"})
    read_llama(model, folder)  # tied, and older files hold these
    assert torch.equal(model.head.weight, tensors["model.embed_tokens.weight"])


def test_launch_refuses_before_anything_starts(spec: RunSpec, exported: Path, toy: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "it's: a folder"
    shutil.copytree(exported, folder)
    toy = [*toy, "model.vocab_size=1000"]
    words = ["launch", "fsdp", *set_options(toy), "--init-from", folder.name]
    good = command([str(BIN / "accel-parallel"), *words, "--dry-run"], tmp_path)
    assert good.returncode == 0, good.stderr
    bad = command([str(BIN / "accel-parallel"), *words, "--set", "model.num_layers=2"], tmp_path)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert len(bad.stderr.splitlines()) == 1
    assert "model.num_layers is 2, 3 there (--set model.num_layers=3)" in bad.stderr
    assert not (tmp_path / "runs").exists()
    # A run that has a checkpoint goes on from it.
    sets = [*toy, f'model.init_from="{folder.name}"']
    make_run(tmp_path / "run", load_spec(None, sets), 5)
    assert command([str(BIN / "accel-parallel"), *words, "--run", "new", "--dry-run"], tmp_path).returncode == 0
    shutil.rmtree(folder)
    going_on = [*words, "--run", "run", "--dry-run"]
    assert command([str(BIN / "accel-parallel"), *going_on], tmp_path).returncode == 0
    assert "is not a folder" in command([str(BIN / "accel-parallel"), *words, "--dry-run"], tmp_path).stderr


def test_specification_errors_are_of_the_specification(spec: RunSpec, tmp_path: Path) -> None:
    with pytest.raises(SpecError):
        check_init_from(model_of(spec, tmp_path))
