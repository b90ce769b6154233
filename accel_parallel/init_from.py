"""The folder that `model.init_from` names: whether its weights fit the model, seen before anything starts."""

import json
from pathlib import Path
from typing import Any

from accel_parallel.errors import DataError, Problem, SpecError
from accel_parallel.llama import refusals, shape_of
from accel_parallel.spec import Model
from accel_parallel.spec.dump import scalar

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
WANTED = "a folder with config.json and safetensors of a Llama model, such as `accel-parallel export` writes"


def folder_of(model: Model) -> Path:
    assert model.init_from is not None
    return Path(model.init_from).expanduser()


def check_init_from(model: Model) -> None:
    """Read config.json, and see that the weights' files are there. Raises SpecError unless they fit `model`."""
    folder = folder_of(model)
    try:
        config = _read_json(folder / CONFIG)
        wrong = refusals(config)
        there = {} if wrong else shape_of(config)
        if not wrong:
            weight_files(folder)
    except DataError as error:
        raise _problem(f"model.init_from {folder}: {error.message}", error.hint or WANTED) from None
    if wrong:
        raise _problem(f"model.init_from {folder} has {'; '.join(wrong)}: TransformerLM cannot represent it", None)
    differing = {key: value for key, value in there.items() if not _agrees(model, key, value)}
    if differing:
        keys = "; ".join(
            f"model.{key} is {scalar(getattr(model, key))}, {_there(key, value)}" for key, value in differing.items()
        )
        fitting = " ".join(f"--set model.{key}={scalar(value)}" for key, value in differing.items())
        raise _problem(f"model.init_from {folder} is of another shape: {keys}", fitting)


def weight_files(folder: Path) -> list[Path]:
    """Its safetensors files. Raises DataError if there are none, or one that its index names is missing."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise DataError(f"holds neither {WEIGHTS} nor {INDEX}; pickled weights are not read", hint=WANTED)
    names = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise DataError(f"{INDEX} has no weight_map from tensors to files")
    files = sorted(set(names.values()))
    for name in files:
        # It comes with the folder, and may not lead out of it.
        if Path(name).name != name or not name.endswith(".safetensors") or not (folder / name).is_file():
            raise DataError(f"{INDEX} names {name[:100]!r}, which is no safetensors file in the folder")
    return [folder / name for name in files]


def _agrees(model: Model, key: str, there: Any) -> bool:
    ours = getattr(model, key)
    # No weight depends on it: shorter sequences than it was trained on are fine.
    return ours <= there if key == "seq_len" else ours == there  # type: ignore[no-any-return]


def _there(key: str, value: Any) -> str:
    return f"{'at most ' if key == 'seq_len' else ''}{scalar(value)} there"


def _read_json(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        raise DataError("is not a folder")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"holds no {path.name}") from None
    except OSError as error:
        raise DataError(f"{path.name} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise DataError(f"{path.name} is not JSON") from None
    if not isinstance(content, dict):
        raise DataError(f"{path.name} is not a JSON object")
    return content


def _problem(message: str, hint: str | None) -> SpecError:
    return SpecError([Problem(message, code="spec-init-from", hint=hint)])
