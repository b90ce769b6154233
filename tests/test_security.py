"""Files of others are data: no code of theirs runs. Secrets of the environment stay there."""

import ast
import io
import json
import pickle
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from accel_parallel.checkpoints import Manifest, Stored, complete_checkpoints, sha256_of
from accel_parallel.errors import RunError
from accel_parallel.redact import HIDDEN, is_secret, redact_command, redact_variables, without_login
from accel_parallel.train.__main__ import main
from tests.workers import Trained, train

PACKAGE = Path(__file__).parent.parent / "accel_parallel"


class Payload:
    """Unpickled, it leaves a file at `marker` and becomes `value`, as what it stands in for would be."""

    def __init__(self, marker: Path, value: object) -> None:
        self.code = f"__import__('pathlib').Path({str(marker)!r}).touch() or {value!r}"

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (self.code,)


def forged_metadata(checkpoint: Path, marker: Path) -> str:
    """Metadata as they were, with one more entry where torch keeps notes that nothing reads."""
    metadata = read_metadata(checkpoint)
    metadata.storage_meta.modules = [Payload(marker, "")]
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    return ".metadata holds builtins.eval"


def other_metadata(checkpoint: Path, marker: Path) -> str:
    """Not metadata at all."""
    (checkpoint / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    return ".metadata holds dict"


def forged_setting(checkpoint: Path, marker: Path) -> str:
    """The optimizer's learning rate, which is no tensor, is an object."""
    replace_entry(checkpoint, "optimizer.param_groups.0.lr", Payload(marker, 0.001))
    return ".distcp holds eval"


def forged_weights(checkpoint: Path, marker: Path) -> str:
    """A tensor is an object."""
    replace_entry(checkpoint, "model.token_emb.weight", Payload(marker, 0.001))
    return ".distcp holds eval"


def read_metadata(checkpoint: Path) -> Any:
    return pickle.loads((checkpoint / ".metadata").read_bytes())


def replace_entry(checkpoint: Path, name: str, content: object) -> None:
    """Append `content` to the file that held the entry, and let the metadata point there."""
    import torch

    metadata = read_metadata(checkpoint)
    for index in [index for index in metadata.storage_data if index.fqn == name]:
        info = metadata.storage_data[index]
        with (checkpoint / info.relative_path).open("ab") as file:
            info.offset = file.tell()
            torch.save(content, file)
            info.length = file.tell() - info.offset
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("strategy", "world_size", "forge"),
    [
        ("single", 1, forged_metadata),
        ("single", 1, other_metadata),
        ("single", 1, forged_setting),
        ("single", 1, forged_weights),
        ("fsdp", 2, forged_metadata),
        ("fsdp", 2, forged_setting),
    ],
)
def test_a_forged_checkpoint_is_refused(
    strategy: str, world_size: int, forge: Callable[[Path, Path], str], toy: list[str], tmp_path: Path
) -> None:
    run, marker = tmp_path / "run", tmp_path / "marker"
    train(run, strategy, world_size, toy, argv=["--stop-at", "3"])
    checkpoint = complete_checkpoints(run)[3]
    expected = forge(checkpoint, marker)
    adapt_manifest(checkpoint)
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    result = train(run, strategy, world_size, toy)
    assert not marker.exists(), "code of the checkpoint ran"
    refused_in_one_line(result)
    assert f"cannot load {checkpoint}: " in result.message
    assert f"{expected}, which no checkpoint of this program holds; it was not loaded" in result.message
    assert f"move {checkpoint.name} away" in result.message
    assert "Traceback" not in result.log
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before


def test_a_forged_name_does_not_reach_the_terminal(tmp_path: Path) -> None:
    from accel_parallel.train.checkpoint.reader import DataReader

    name = b"bell\x07\x1b[31m\nline" + b"x" * 200
    (tmp_path / ".metadata").write_bytes(b"\x80\x04\x8c\x02os\x8c" + bytes([len(name)]) + name + b"\x93.")
    with pytest.raises(RunError) as caught:
        DataReader(tmp_path, [])
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200


def as_python_3_11_0_writes(value: object) -> bytes:
    """Enumerations as `getattr(class, name)`, and so until 3.11.3."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, each: Any) -> Any:
            return (getattr, (type(each), each.name)) if isinstance(each, Enum) else NotImplemented

    Pickler(file := io.BytesIO(), protocol=4).dump(value)
    return file.getvalue()


def test_metadata_of_an_older_python_are_read_and_getattr_reaches_nothing_else(tmp_path: Path) -> None:
    import torch
    from torch.distributed.checkpoint import metadata as dcp

    from accel_parallel.train.checkpoint.reader import DataReader

    weight = dcp.TensorStorageMetadata(dcp.TensorProperties(), torch.Size([2]), [])
    (tmp_path / ".metadata").write_bytes(as_python_3_11_0_writes(dcp.Metadata({"weight": weight})))
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert DataReader(tmp_path, []).read_metadata().state_dict_metadata["weight"].properties == weight.properties
    for owner, name in ((dcp.Metadata, "__init__"), (dcp._MEM_FORMAT_ENCODING, "__class__")):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Reduced(owner, name)))
        with pytest.raises(RunError, match=r"holds builtins\.getattr, which no checkpoint of this program holds"):
            DataReader(tmp_path, [])


class Reduced:
    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return getattr, self.arguments


def adapt_manifest(checkpoint: Path) -> None:
    """As somebody who forges files would: nothing of it looks changed."""
    path = checkpoint / "manifest.json"
    manifest = Manifest.loads(path.read_text())
    files = {
        name: Stored(bytes=(checkpoint / name).stat().st_size, sha256=sha256_of(checkpoint / name))
        for name in manifest.files
    }
    path.write_text(manifest.model_copy(update={"files": files}).dumps())


def refused_in_one_line(result: Trained) -> None:
    assert set(result.exit_codes) == {2}, result.errors
    for error in result.errors:
        assert error["traceback"] is None
        assert len(error["problems"]) == 1
        assert "\n" not in error["problems"][0]["message"]


def test_no_code_of_a_specification_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marker, spec = tmp_path / "marker", tmp_path / "spec.yaml"
    value = f"!!python/object/apply:os.system ['touch {marker}']"
    spec.write_text(f"training:\n  steps: {value}\n")
    for arguments in (["--spec", str(spec)], ["--set", f"logging.every={value}"]):
        assert main(arguments) == 2
        assert not marker.exists(), "code of the specification ran"
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        assert "YAML" in lines[0]


def test_no_code_of_a_recipe_runs(toy: list[str], tmp_path: Path) -> None:
    marker, recipe = tmp_path / "marker", tmp_path / "recipe.yaml"
    recipe.write_text(f"source: files\npath: !!python/object/apply:os.system ['touch {marker}']\n")
    result = train(tmp_path / "run", "single", 1, [*toy, f"data.recipe={recipe}"])
    assert not marker.exists(), "code of the recipe ran"
    refused_in_one_line(result)
    assert f"recipe {recipe} is not valid YAML" in result.message


def test_no_code_of_a_tokenizer_runs(toy: list[str], tmp_path: Path) -> None:
    """Told nothing, transformers asks on the terminal whether to run it: a launch would wait for an answer."""
    marker, folder = tmp_path / "marker", tmp_path / "tokenizer"
    folder.mkdir()
    names = {"AutoTokenizer": ["own.OwnTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "OwnTokenizer", "auto_map": names}))
    (folder / "own.py").write_text(
        "import pathlib\n"
        "from transformers import PreTrainedTokenizer\n"
        f"pathlib.Path({str(marker)!r}).touch()\n"
        "class OwnTokenizer(PreTrainedTokenizer):\n    pass\n"
    )
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    result = train(tmp_path / "run", "single", 1, [*toy, f"data.tokenizer={folder}"], environment=environment)
    assert not marker.exists(), "code of the tokenizer ran"
    refused_in_one_line(result)
    assert f"data.tokenizer '{folder}' brings Python code of its own, which is never run" in result.message


def test_no_code_of_a_dataset_runs(toy: list[str], tmp_path: Path) -> None:
    marker, folder, recipe = tmp_path / "marker", tmp_path / "owned", tmp_path / "recipe.yaml"
    folder.mkdir()
    (folder / "owned.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    recipe.write_text(f"source: hub\ndataset: {folder}\n")
    environment = {"HF_DATASETS_TRUST_REMOTE_CODE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    result = train(tmp_path / "run", "single", 1, [*toy, f"data.recipe={recipe}"], environment=environment)
    assert not marker.exists(), "code of the dataset ran"
    refused_in_one_line(result)
    assert f"dataset {folder} brings Python code of its own, which is never run" in result.message


def test_whatever_can_run_code_of_others_is_told_not_to() -> None:
    """Versions of `datasets` before 4 ask on the terminal, or obey an environment variable, unless told."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called.endswith(("load_dataset", "load_dataset_builder")) or (
                called.endswith("from_pretrained") and not called.startswith("nn.")
            ):
                assert isinstance(node, ast.Call)
                found.append(called)
                told = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert told.get("trust_remote_code") == "False", f"{path.name}: {ast.unparse(node)}"
    assert set(found) == {
        "AutoTokenizer.from_pretrained",
        "transformers.AutoConfig.from_pretrained",
        "AutoModelForCausalLM.from_pretrained",
        "LlamaForCausalLM.from_pretrained",
        "datasets.load_dataset",
    }


SECRETS = {
    "HF_TOKEN": "hf_PLANTED_ONE",
    "WANDB_API_KEY": "PLANTED_TWO",
    "AWS_SECRET_ACCESS_KEY": "PLANTED_THREE",
    "ACCELERATE_MY_TOKEN": "PLANTED_FOUR",
    "NCCL_SECRET_KEY": "PLANTED_FIVE",
    "NCCL_PROXY": "http://someone:PLANTED_SIX@proxy:3128",
}


def test_a_run_directory_holds_no_secrets(toy: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["train.py", "--hf-token=PLANTED_SEVEN", "--token", "PLANTED_EIGHT", "--index", "https://a:PLANTED_9@b/c"]
    monkeypatch.setattr(sys, "argv", command)  # workers are started with it
    sets = [*toy, "logging.trackers=[tensorboard]", "checkpoint.every=2"]
    result = train(
        tmp_path / "run", "single", 1, sets, argv=["--stop-at", "3"], environment={**SECRETS, "NCCL_DEBUG": "WARN"}
    )
    assert result.exit_codes == [0], result.errors
    files = [path for path in result.run.rglob("*") if path.is_file()]
    assert {".metadata", "environment.json", "metrics.jsonl", "spec.yaml"} <= {path.name for path in files}
    assert any("tfevents" in path.name for path in files)
    for path in files:
        assert b"PLANTED" not in path.read_bytes(), path
    variables = result.environment["variables"]
    assert variables["NCCL_DEBUG"] == "WARN"
    assert variables["ACCELERATE_MY_TOKEN"] == HIDDEN
    assert variables["NCCL_PROXY"] == f"http://{HIDDEN}@proxy:3128"
    assert not {"HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"} & set(variables)
    assert result.environment["command"] == [
        *("train.py", f"--hf-token={HIDDEN}", "--token", HIDDEN, "--index", f"https://{HIDDEN}@b/c")
    ]


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "hf_token", "MY_SECRET_ID", "DB_PASSWORD", "AWS_CREDENTIALS", "API_KEY", "--api-key", "x.token"],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["NCCL_DEBUG", "KEYBOARD", "data.max_tokens", "data.tokenizer", "training.lr", "model.num_kv_heads", ""]
)
def test_names_of_no_secrets(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pw@host/a", f"https://{HIDDEN}@host/a"),
        ("https://me@host", f"https://{HIDDEN}@host"),
        ("https://me:p@w@host/a b ssh://x:y@z", f"https://{HIDDEN}@host/a b ssh://{HIDDEN}@z"),
        ("https://host/me:pw@1.0", "https://host/me:pw@1.0"),
        ("me@host", "me@host"),
    ],
)
def test_logins_in_urls_are_hidden(text: str, shown: str) -> None:
    assert without_login(text) == shown


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--hf-token=abc"], [f"--hf-token={HIDDEN}"]),
        (["--set", "x.token=abc=d"], ["--set", f"x.token={HIDDEN}"]),
        (["--set=x.token=abc"], [f"--set=x.token={HIDDEN}"]),
        (["--token", "abc", "abc"], ["--token", HIDDEN, "abc"]),
        (["--token", "-abc"], ["--token", HIDDEN]),
        (["--token", "-my-token", "abc"], ["--token", HIDDEN, "abc"]),
        (["--token", "--api-key", "abc"], ["--token", "--api-key", HIDDEN]),
        (["--token=abc", "run"], [f"--token={HIDDEN}", "run"]),
        (["--set", "data.max_tokens=9", "--run", "token"], ["--set", "data.max_tokens=9", "--run", "token"]),
        (["--proxy=http://me:pw@host"], [f"--proxy=http://{HIDDEN}@host"]),
    ],
)
def test_a_command_line_is_shown_without_secrets(arguments: list[str], shown: list[str]) -> None:
    assert redact_command(arguments) == shown


def test_variables_are_shown_without_secrets() -> None:
    variables = {"NCCL_KEY": "abc", "NCCL_DEBUG": "INFO", "ACCELERATE_URL": "http://me:pw@host"}
    assert redact_variables(variables) == {
        "NCCL_KEY": HIDDEN,
        "NCCL_DEBUG": "INFO",
        "ACCELERATE_URL": f"http://{HIDDEN}@host",
    }
