"""The checkpoints of one run, for its processes. Every method is collective unless it says otherwise."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_parallel.checkpoints import Checkpoint, Manifest, list_checkpoints, wrong_digest
from accel_parallel.continuing import changes
from accel_parallel.errors import RunError
from accel_parallel.runs import Run
from accel_parallel.train.checkpoint.publish import publish
from accel_parallel.train.checkpoint.together import Together
from accel_parallel.train.checkpoint.write import Saved, Writer
from accel_parallel.train.runtime import Runtime
from accel_parallel.train.state import TrainState


class Checkpoints:
    """Saves, restores and keeps them.

    What they hold: weights, optimizer state, and where training is. There is no random state to keep: the order of the
    data follows from the seed and the samples seen, and nothing in the model draws numbers.
    """

    def __init__(self, run: Run, runtime: Runtime, data_fingerprint: str) -> None:
        self._run = run
        self._runtime = runtime
        self._settings = runtime.spec.checkpoint
        self._about = {
            "strategy": runtime.asked.strategy_name,
            "world_size": runtime.world_size,
            "data": data_fingerprint,
            "spec": runtime.spec.model_dump(mode="json", by_alias=True),
        }
        self._together = Together(runtime.save_group, run.path)
        self._writer = Writer(runtime.save_group, run.path, in_background=self._settings.async_)

    def path(self, state: TrainState) -> Path:
        """Not collective. Where the checkpoint of this state is, or would be."""
        return self._run.checkpoints / f"step-{state.step:08d}"

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: TrainState) -> list[Saved]:
        """Write `checkpoints/step-<NNNNNNNN>`, or begin to: `ended` tells when it is there.

        The one before, if it is still being written, is waited for and returned. Raises RunError when one cannot be
        written; the others stay as they are.
        """
        from torch.distributed.checkpoint.state_dict import get_state_dict

        ended = self.ended(wait=True)
        weights, moments = get_state_dict(model, unwrap(optimizer))

        def make_visible(partial: Path, files: dict[str, Any]) -> None:
            publish(partial, files, state, about=self._about, keep=self._settings.keep)

        with self._confirming():
            self._writer.start(self.path(state), state.step, {"model": weights, "optimizer": moments}, make_visible)
        return ended

    def wait_until_copied(self) -> None:
        """Not collective. Call it before the weights change: the save behind may still be copying them."""
        self._writer.wait_until_copied()

    def failing(self) -> bool:
        """Not collective. Whether a save behind has failed here; once all know, `ended(wait=True)` raises why."""
        return self._writer.failed

    def ended(self, *, wait: bool = False) -> list[Saved]:
        """What has been written since the last call; not collective unless all `wait`. Then it raises RunError."""
        with self._confirming():
            saved = self._writer.collect(wait=wait)
        return [saved] if saved else []

    def found(self) -> bool:
        """Whether there is a complete one, before its digests are read."""
        return any(found.damage is None for found in self._newest_first())

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer, say: Callable[[str], None]) -> TrainState:
        """Load the newest checkpoint that is intact, in place; a fresh state if there is none.

        Those that are not are named, and left where they are. Raises RunError when it is of another model, or of other
        tokens.
        """
        newest = self._newest_intact(say)
        if newest is not None:
            return self._load(newest, model, optimizer)
        if self._runtime.spec.model.init_from and self.found():
            # Nobody read the weights of `model.init_from`, as these checkpoints were to replace them.
            hint = "move its checkpoints away to start from model.init_from again"
            raise RunError(f"no checkpoint of {self._run.path} is intact", hint=hint)
        return TrainState()

    def _newest_intact(self, say: Callable[[str], None]) -> Checkpoint | None:
        """Its files read; those before it that are not intact are told."""
        for found in self._newest_first():
            damage = found.damage or self._wrong_digest(found)
            if damage is None:
                return found
            say(f"{found.path} is not used: {damage}")
        return None

    def _newest_first(self) -> list[Checkpoint]:
        # The main process's view counts: on a shared disk others may see a new directory later.
        found = list_checkpoints(self._run.path) if self._runtime.is_main else []
        return self._runtime.tell_all(found)[::-1]

    def _wrong_digest(self, found: Checkpoint) -> str | None:
        """Each process reads its share of the files."""
        if not self._settings.verify:
            return None
        assert found.manifest is not None
        mine = sorted(found.manifest.files)[self._together.rank :: self._together.size]
        return next(filter(None, self._together.gather(wrong_digest(found, mine))), None)

    def _load(self, found: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainState:
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        from accel_parallel.train.checkpoint.reader import DataPlanner, DataReader

        assert found.manifest is not None
        self._refuse_other(found.path, found.manifest)
        groups = unwrap(optimizer).param_groups
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        weights, moments = get_state_dict(model, unwrap(optimizer))
        doing, group = f"cannot load {found.path}", self._together.group
        try:
            reader = self._together.do(doing, lambda: DataReader(found.path, found.manifest.files))  # type: ignore[union-attr]
            self._together.do(
                doing,
                lambda: load(
                    {"model": weights, "optimizer": moments},
                    storage_reader=reader,
                    planner=DataPlanner(),
                    process_group=group,
                    no_dist=group is None,
                ),
            )
        except RunError as error:
            hint = f"move {found.path.name} away to go on from the one before"
            raise RunError(error.message, hint=hint) from error
        set_state_dict(model, unwrap(optimizer), model_state_dict=weights, optim_state_dict=moments)
        # Not those of the run before: another weight decay is asked for now, another kernel fits this device.
        for now, asked in zip(unwrap(optimizer).param_groups, options, strict=True):
            now.update(asked)
        return TrainState(**found.manifest.state.model_dump())

    def _refuse_other(self, path: Path, manifest: Manifest) -> None:
        refused = [change for change in changes(manifest.flat_spec, self._runtime.spec) if change.effect.refused]
        if refused:
            why = "; ".join(f"{change}: {change.effect.value}" for change in refused)
            raise RunError(f"{path} cannot go on with {why}", hint="--fresh starts a new run")
        if manifest.data != self._about["data"]:
            raise RunError(
                f"{path} was trained on other tokens than these: the text or its tokenizer changed",
                hint="--fresh starts a new run",
            )

    @contextmanager
    def _confirming(self) -> Iterator[None]:
        """A save that failed, which it did on all ranks, says what it leaves."""
        try:
            yield
        except RunError as error:
            raise RunError(error.message, hint=self._what_is_left()) from error

    def _what_is_left(self) -> str:
        """The newest complete checkpoint, looked at once more."""
        found = self._newest_intact(lambda text: None)
        if found is None:
            return "there is no earlier checkpoint"
        read = "its digests were read" if self._settings.verify else "its sizes were looked at"
        return f"{found.path.name} is intact, {read}"


def unwrap(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside Accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)
