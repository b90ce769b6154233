"""`python -m accel_parallel.train.export`: a checkpoint as a Hugging Face Llama folder, one tensor at a time."""

import argparse
import json
import math
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from accel_parallel.errors import RunError
from accel_parallel.files import fsync
from accel_parallel.init_from import CONFIG, INDEX, WEIGHTS
from accel_parallel.llama import DTYPES, llama_config, llama_name
from accel_parallel.output import Output, failing
from accel_parallel.train.agent import die_with_parent
from accel_parallel.train.saved import SavedModel, Say, open_saved
from accel_parallel.verbs import parser
from accel_parallel.verbs.export import add_arguments

if TYPE_CHECKING:
    from torch import Tensor

Sizes = dict[str, tuple[int, ...]]


def main(argv: Sequence[str] | None = None) -> int:
    """Export; the summary goes to stdout, progress and errors to stderr. Ends the process with its exit code."""
    arguments = parser("export", add_arguments).parse_args(argv)
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGTERM, _end)
    with failing("export", arguments.json) as output:
        work(arguments, output)
    return 0


def work(arguments: argparse.Namespace, output: Output) -> None:
    folder = check_target(arguments.to)
    saved = open_saved(arguments.run, arguments.step, output.say)
    data = export(saved, folder, arguments.dtype, arguments.max_shard_size, output.say)
    files = "1 file" if len(data["files"]) == 1 else f"{len(data['files'])} files"
    line = f"{saved.path} is in {arguments.to}: {data['parameters']:,} parameters, {arguments.dtype}, "
    output.finish(data, [f"{line}{data['bytes'] / 2**20:,.1f} MiB in {files}"], [], 0)


def check_target(folder: Path) -> Path:
    """Where to write. Raises RunError unless it is a new or empty folder."""
    path, hint = folder.expanduser().resolve(), "name a new or an empty folder with --to; nothing is overwritten"
    if path.exists() and not path.is_dir():
        raise RunError(f"{folder} is a file", hint=hint)
    if path.is_dir() and any(path.iterdir()):
        raise RunError(f"{folder} is not empty", hint=hint)
    if path == Path.cwd():
        raise RunError(f"{folder} is the current folder, and would be replaced", hint=hint)
    return path


def export(saved: SavedModel, folder: Path, dtype: str, max_shard_bytes: int, say: Say) -> dict[str, Any]:
    """Write the folder, complete or not at all; what was written. Raises RunError."""
    tokens, model = saved.tokens(), saved.model
    read, sizes = saved.reader(), saved.sizes()
    shards = split(sizes, DTYPES[dtype][1], max_shard_bytes)
    parameters = sum(map(math.prod, sizes.values()))
    total = parameters * DTYPES[dtype][1]
    try:
        with new_folder(folder) as partial:
            shutil.copytree(tokens.tokenizer_folder, partial, dirs_exist_ok=True)
            _write_json(partial / CONFIG, llama_config(model, tokens.end_of_text, dtype))
            if tokens.end_of_text is not None:
                ends = {"eos_token_id": tokens.end_of_text, "pad_token_id": tokens.end_of_text}
                _write_json(partial / "generation_config.json", ends)
            for number, (name, shard) in enumerate(shards.items(), 1):
                write_safetensors(partial / name, shard, dtype, read)
                if len(shards) > 1:
                    say(f"{name} is written, {number} of {len(shards)}")
            if len(shards) > 1:
                places = {llama_name(key): name for name, shard in shards.items() for key in shard}
                _write_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    except OSError as error:
        message = f"cannot write {folder}: {error.strerror or error}; {total / 2**20:,.1f} MiB are needed"
        raise RunError(message, hint="make room, or name another disk with --to; nothing was left behind") from error
    return {
        "run": str(saved.run),
        "checkpoint": str(saved.path),
        "step": saved.manifest.state.step,
        "folder": str(folder),
        "dtype": dtype,
        "parameters": parameters,
        "bytes": total,
        "files": list(shards),
    }


def split(sizes: Sizes, bytes_per_number: int, max_bytes: int) -> dict[str, Sizes]:
    """Parameters by file, in their order, as transformers does it: a file that would grow beyond `max_bytes` ends."""
    shards: list[Sizes] = [{}]
    filled = 0
    for name, shape in sizes.items():
        length = math.prod(shape) * bytes_per_number
        if shards[-1] and filled + length > max_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += length
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def write_safetensors(path: Path, shard: Sizes, dtype: str, read: "Callable[[str], Tensor]") -> None:
    """One file: the length of its header in 8 bytes, the header in JSON, and the numbers, tensor after tensor.

    Not by the library's `save_file`, which wants all tensors of the file in memory.
    (Format: https://huggingface.co/docs/safetensors, "Format".)
    """
    word, bytes_per_number = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shard.items():
        begin, end = end, end + math.prod(shape) * bytes_per_number
        header[llama_name(name)] = {"dtype": word, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shard:
            file.write(_content(read(name), dtype))


def _content(tensor: "Tensor", dtype: str) -> memoryview:
    """Its numbers in row order, little-endian as every machine that torch supports."""
    import torch

    return tensor.to(getattr(torch, dtype)).contiguous().view(torch.uint8).numpy().data


_HALF_WRITTEN: list[Path] = []


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A hidden folder beside `final` that takes its name when the block ends well, and is removed when it does not."""
    partial = final.with_name(f".{final.name}.{secrets.token_hex(4)}.partial")
    _HALF_WRITTEN.append(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in [*partial.rglob("*"), partial]:
            fsync(path)
        partial.rename(final)
        fsync(final.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _end(number: int, frame: FrameType | None) -> None:
    # Not by an exception, which is lost when the signal comes inside of a callback of torch or of the interpreter.
    for partial in _HALF_WRITTEN:
        shutil.rmtree(partial, ignore_errors=True)
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
