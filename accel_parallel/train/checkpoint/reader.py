"""Reading a checkpoint without running what it may bring along.

torch.distributed.checkpoint (seen in torch 2.9 and 2.13) reads `.metadata` with plain pickle, and what is no tensor
with `torch.load(weights_only=False)`: a forged file of either kind could run any code.
"""

import io
import pickle
import re
from collections.abc import Collection
from pathlib import Path, PosixPath
from typing import IO, Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from torch.serialization import _get_layout

from accel_parallel.errors import RunError

METADATA = ".metadata"
_CLASSES = (
    *(dcp.Metadata, dcp.MetadataIndex, dcp.StorageMeta, dcp.TensorStorageMetadata, dcp.BytesStorageMetadata),
    *(dcp.ChunkStorageMetadata, dcp.TensorProperties, dcp._MEM_FORMAT_ENCODING, _StorageInfo, torch.Size),
)


def _member(owner: Any, name: Any) -> Any:
    """A member of the one enumeration in there: Python 3.11.0 to 3.11.3 write it as `getattr(class, name)`."""
    if owner is not dcp._MEM_FORMAT_ENCODING or name not in dcp._MEM_FORMAT_ENCODING.__members__:
        raise _refusal(METADATA, "builtins.getattr")
    return dcp._MEM_FORMAT_ENCODING[name]


# Looked up, never imported. Python 3.13 has moved its paths; a checkpoint may come from before or after.
_KNOWN: dict[tuple[str, str], Any] = {
    **{(known.__module__, known.__name__): known for known in _CLASSES},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch.serialization", "_get_layout"): _get_layout,
    ("builtins", "getattr"): _member,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,
}


class DataReader(FileSystemReader):
    """Reads a checkpoint of this program. Raises RunError, here or in `load`, if it holds anything but data.

    Only the `files` of its manifest are read. The metadata are read at once: of an error inside `load` torch makes an
    assertion about something else.
    """

    def __init__(self, folder: Path, files: Collection[str]) -> None:
        super().__init__(folder)
        self._files = files
        self._file = METADATA
        with (folder / METADATA).open("rb") as file:
            self._metadata = _Unpickler(file).load()
        if not isinstance(self._metadata, dcp.Metadata):
            raise _refusal(METADATA, type(self._metadata).__name__)

    def read_metadata(self, *_: Any, **__: Any) -> dcp.Metadata:
        return self._metadata

    def _slice_file(self, file: IO[bytes], sinfo: _StorageInfo) -> IO[bytes]:
        if sinfo.relative_path not in self._files:
            raise _refusal(METADATA, f"a reference to {sinfo.relative_path}")
        self._file = sinfo.relative_path
        return super()._slice_file(file, sinfo)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError as error:
            found = re.search(r"GLOBAL (\S+)", str(error))
            raise _refusal(self._file, found[1] if found else "something else than tensors and numbers") from None


class DataPlanner(DefaultLoadPlanner):
    """Loads what is no tensor (the optimizer's settings) without unpickling arbitrary objects."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, torch.load(value, weights_only=True))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise _refusal(METADATA, f"{module}.{name}")
        return _KNOWN[module, name]


def _refusal(file: str, what: str) -> RunError:
    # Both were chosen by whoever wrote the files.
    file, what = (ascii(text)[1:-1][:100] for text in (file, what))
    return RunError(f"{file} holds {what}, which no checkpoint of this program holds; it was not loaded")
