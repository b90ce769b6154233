"""`python -m accel_parallel.train.model_tree MODEL`: the modules of any model as JSON, built without memory for them.

MODEL is a folder with the config.json of a Hugging Face model, of which no code is run, or `pkg.module:factory`, a
function without arguments that returns the model.
"""

import argparse
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel_parallel.errors import ModelError
from accel_parallel.train.agent import die_with_parent


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tree, or the problem that stands against it, as one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m accel_parallel.train.model_tree")
    parser.add_argument("model", metavar="MODEL", help="folder with a config.json, or pkg.module:factory")
    arguments = parser.parse_args(argv)
    die_with_parent(signal.SIGTERM)
    # What a model's own code prints must not stand between the JSON.
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        answer = {"tree": describe(build(arguments.model))}
    except ModelError as error:
        answer = {"problem": {"message": error.message, "hint": error.hint}}
    with stdout:
        stdout.write(json.dumps(answer))
    return 0


def build(name: str) -> Any:
    """The model, an `nn.Module` whose parameters are on torch's meta device. Raises ModelError."""
    import torch
    from torch import nn

    folder = Path(name).is_dir() or ":" not in name
    with torch.device("meta"):
        model = from_folder(Path(name)) if folder else from_factory(name)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def from_factory(name: str) -> Any:
    """What the function returns. Raises ModelError if there is no such function, or if it fails."""
    module_name, _, attribute = name.partition(":")
    # As `python -m` has it; the folder in which the command was typed.
    sys.path[:] = ["", *(entry for entry in sys.path if entry != "")]
    try:
        factory = getattr(importlib.import_module(module_name), attribute, None)
    except ModuleNotFoundError as error:
        raise ModelError(f"cannot import {module_name!r}: {error}") from error
    except Exception as error:
        raise ModelError(f"cannot import {module_name!r}: {_reason(error)}", hint=_place(error)) from error
    if factory is None:
        raise ModelError(f"module {module_name} has no {attribute!r}")
    if not callable(factory):
        raise ModelError(f"{name} is {type(factory).__name__}, not a function that returns a model")
    try:
        return factory()
    except Exception as error:
        raise ModelError(f"{name} failed: {_reason(error)}", hint=_place(error)) from error


def from_folder(folder: Path) -> Any:
    """The architecture that config.json names, in float32. Raises ModelError if transformers does not know it."""
    import torch

    config_file = folder / "config.json"
    if not config_file.is_file():
        what = "has no config.json" if folder.is_dir() else "is neither a folder nor pkg.module:factory"
        hint = "name a folder with a Hugging Face config.json, or pkg.module:factory"
        raise ModelError(f"{folder} {what}", hint=hint)
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"{config_file} is not a model that transformers knows: {_reason(error)}") from error
    # torch's meta device is asked for by the caller.
    named = next(iter(getattr(config, "architectures", None) or ()), "")
    known = getattr(transformers, named, None)
    try:
        if isinstance(known, type) and issubclass(known, transformers.PreTrainedModel):
            return known(config).to(torch.float32)
        return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False).to(torch.float32)
    except Exception as error:
        raise ModelError(f"{config_file} does not make a model: {_reason(error)}", hint=_place(error)) from error


def describe(model: Any) -> dict[str, Any]:
    """The tree that `accel_parallel.units.model_of` reads. Shared parameters are recognised by identity."""
    # Of parameters, the name under which the model has them first; a module at two places stands at the first.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places = {id(module): name for name, module in model.named_modules()}
    seen: set[int] = set()

    def node(module: Any) -> dict[str, Any]:
        seen.add(id(module))
        own = {names[id(each)]: list(each.shape) for each in module.parameters(recurse=False)}
        children = [node(child) for child in module.children() if id(child) not in seen]
        return {
            "name": places[id(module)],
            "class": type(module).__name__,
            "bases": [base.__name__ for base in type(module).__mro__[1:-1]],
            "has_forward": _has_forward(module),
            "own": own,
            "children": children,
        }

    root = node(model)
    fails: list[str] = []
    ends = {
        "input_embedding": _embedding(model, "get_input_embeddings", fails),
        "output_embedding": _embedding(model, "get_output_embeddings", fails),
        "final_norm": _final_norm(model),
    }
    return {
        "root": root,
        **{key: places.get(id(module)) for key, module in ends.items()},
        "no_split": sorted(getattr(model, "_no_split_modules", None) or ()),
        "fails_version2": next(iter(fails), None),
    }


def _has_forward(module: Any) -> bool:
    from torch import nn

    return type(module).forward is not nn.Module.forward


def _embedding(model: Any, method: str, fails: list[str]) -> Any:
    """As Accelerate asks for it in version 2 (utils/fsdp_utils.py, `fsdp2_prepare_model`, 1.15), where it may fail."""
    try:
        return getattr(model, method, lambda: None)()
    except Exception as error:
        fails.append(f"{type(model).__name__}.{method}() fails: {_reason(error)}")
        return None


def _final_norm(model: Any) -> Any:
    """The last norm among the base model's children (utils/fsdp_utils.py, `_find_final_norm`, accelerate 1.15)."""
    from torch import nn

    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if prefix else model
    children = base.children() if isinstance(base, nn.Module) else ()
    return next((child for child in reversed(list(children)) if "Norm" in type(child).__name__), None)


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _place(error: BaseException) -> str | None:
    """The line of the model's own code that failed, the innermost."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    return f"in {frames[-1].filename}:{frames[-1].lineno}" if len(frames) > 1 else None


if __name__ == "__main__":
    sys.exit(main())
