"""The model in a run's checkpoint, read one tensor at a time by a single process."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from accel_parallel.checkpoints import Checkpoint, Manifest, list_checkpoints, wrong_digest
from accel_parallel.errors import RunError, SpecError
from accel_parallel.runs import require_run
from accel_parallel.spec import Model, load_spec

if TYPE_CHECKING:  # seconds to import: what can be refused without is refused before
    from torch import Tensor

    from accel_parallel.train.data import TokenData

Say = Callable[[str], None]


@dataclass(frozen=True)
class SavedModel:
    """An intact checkpoint of `run`."""

    run: Path
    path: Path
    manifest: Manifest

    @property
    def model(self) -> Model:
        """The shape that was trained. Raises RunError if this version does not understand it."""
        try:
            return Model.model_validate(self.manifest.spec.get("model", {}))
        except ValidationError as error:
            key = ".".join(map(str, error.errors()[0]["loc"]))
            raise RunError(f"{self.path} was saved by another version: model.{key} is not understood") from None

    def tokens(self) -> "TokenData":
        """The tokens that it was trained on, and their tokenizer. Raises RunError if the cache lacks them."""
        from accel_parallel.train.data.build import find_tokens
        from accel_parallel.train.data.cache import cache_root

        found = find_tokens(self.manifest.data, self.manifest.flat_spec.get("data.tokenizer"))
        if found is None:
            hint = f"`accel-parallel prepare --spec {self.run}/spec.yaml` makes it again from the same text"
            raise RunError(f"the tokenizer of {self.run} is not in the cache {cache_root()} any more", hint=hint)
        return found

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter by `TransformerLM`'s name, in its order; a tied head is not among them."""
        import torch

        from accel_parallel.train.model import TransformerLM

        with torch.device("meta"):
            model = TransformerLM(self.model)
        return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    def reader(self) -> "Callable[[str], Tensor]":
        """A function that reads one parameter. It raises RunError for what a checkpoint of this shape does not hold."""
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        from accel_parallel.train.checkpoint.reader import DataReader

        sizes, reader = self.sizes(), DataReader(self.path, self.manifest.files)
        stored = reader.read_metadata().state_dict_metadata

        def read(name: str) -> "Tensor":
            import torch

            about = stored.get(f"model.{name}")
            if not isinstance(about, TensorStorageMetadata) or tuple(about.size) != sizes[name]:
                raise RunError(f"{self.path} is damaged: it holds no {name} of {sizes[name]}")
            tensor = torch.empty(about.size, dtype=about.properties.dtype)
            _load({"model": {name: tensor}}, reader)
            return tensor

        return read


def open_saved(run: Path, step: int | None, say: Say) -> SavedModel:
    """The newest intact checkpoint of a run, or that of `step`; damaged ones are told. Needs no torch.

    Raises RunError if there is no such run or checkpoint, or if the one asked for is damaged.
    """
    require_run(run)
    found = list_checkpoints(run)[::-1]
    if step is not None:
        steps = ", ".join(str(checkpoint.step) for checkpoint in found)
        found = [checkpoint for checkpoint in found if checkpoint.step == step]
        if not found:
            raise RunError(f"{run} has no checkpoint of step {step}", hint=f"it has {steps or 'none at all'}")
    verify = _verifies(run)
    for checkpoint in found:
        damage = checkpoint.damage or (_wrong_digest(checkpoint, say) if verify else None)
        if damage is None:
            assert checkpoint.manifest is not None
            return SavedModel(run, checkpoint.path, checkpoint.manifest)
        if step is not None:
            raise RunError(f"{checkpoint.path} is damaged: {damage}", hint="leave --step out for the newest intact one")
        say(f"{checkpoint.path} is not used: {damage}")
    hint = "train on: a launch saves at its end and each checkpoint.every steps"
    raise RunError(f"{run} has no complete checkpoint", hint=hint)


def _verifies(run: Path) -> bool:
    try:
        return load_spec(run / "spec.yaml").checkpoint.verify
    except SpecError:  # of another version
        return True


LARGE_BYTES = 2**30


def _wrong_digest(checkpoint: Checkpoint, say: Say) -> str | None:
    if checkpoint.bytes > LARGE_BYTES:
        say(f"reading the digests of {checkpoint.path}, {checkpoint.bytes / 2**30:.1f} GiB")
    return wrong_digest(checkpoint)


def _load(tensors: dict[str, Any], reader: Any) -> None:
    """Fill the tensors in place."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    from accel_parallel.train.checkpoint.reader import DataPlanner

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(tensors, storage_reader=reader, planner=DataPlanner(), no_dist=True)
    except CheckpointException as error:
        # It wraps whatever was raised, Ctrl-C too.
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, RunError | OSError) or not isinstance(cause, Exception):
            raise cause from None
        raise RunError(f"{reader.path} is damaged: {str(cause).splitlines()[0][:200]}") from cause
