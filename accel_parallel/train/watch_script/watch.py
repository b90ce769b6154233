"""The methods of Accelerate's classes that are replaced while a script runs. Each calls the original, once."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.tracking import GeneralTracker
from torch import nn

from accel_parallel.asked import Asked
from accel_parallel.substitutions import Substitution
from accel_parallel.train.watch_script.models import Before, watch_model
from accel_parallel.train.watch_script.record import MOST_LOSSES, Record, number, readable, scalar
from accel_parallel.train.watch_script.steps import Steps


@contextmanager
def watching(folder: Path, asked: Asked, substitutions: list[Substitution]) -> Iterator[None]:
    """Observe what runs inside, and write it to `folder`/rank-NN.json, however it ends. Raises OSError.

    `asked` is what the launch asks for; a plugin that the script builds may still add to `substitutions`.
    """
    record = Record(folder.absolute(), substitutions)
    steps = Steps(record)
    with ExitStack() as replaced:
        Observers(record, steps, asked).install(replaced)
        try:
            record.write()
            yield
        except SystemExit as end:
            record.ended = "done" if end.code in (None, 0) else f"SystemExit: {end.code}"
            raise
        except BaseException as error:
            record.ended = f"{type(error).__name__}: {error}"
            raise
        else:
            record.ended = "done"
        finally:
            steps.end()
            record.write()


class Observers:
    """What the replaced methods do besides what they are there for."""

    def __init__(self, record: Record, steps: Steps, asked: Asked) -> None:
        self._record, self._steps, self._asked = record, steps, asked
        self._seen: WeakKeyDictionary[Accelerator, int] = WeakKeyDictionary()
        self._preparing = False
        self._logging = False

    def install(self, replaced: ExitStack) -> None:
        replace(replaced, Accelerator, "__init__", self._init)
        replace(replaced, Accelerator, "prepare", self._prepare)
        replace(replaced, Accelerator, "prepare_model", self._prepare_model)
        replace(replaced, Accelerator, "backward", self._backward)
        replace(replaced, Accelerator, "log", self._log)
        replace(replaced, AcceleratedOptimizer, "step", self._step)
        for tracker in subclasses(GeneralTracker):
            if "log" in vars(tracker):
                replace(replaced, tracker, "log", self._log)
        # Those that the script defines itself.
        original = GeneralTracker.__init_subclass__

        def init_subclass(cls: type, /, **kwargs: Any) -> None:
            original(**kwargs)
            if "log" in vars(cls):
                replace(replaced, cls, "log", self._log)

        GeneralTracker.__init_subclass__ = classmethod(init_subclass)
        replaced.callback(delattr, GeneralTracker, "__init_subclass__")

    def _init(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        def init(accelerator: Accelerator, *args: Any, **kwargs: Any) -> None:
            given = dict(signature.bind(accelerator, *args, **kwargs).arguments)
            del given["self"]
            seen: dict[str, Any] = {"given": {name: readable(value) for name, value in given.items()}, "got": None}
            self._seen[accelerator] = len(self._record.accelerators)
            self._record.accelerators.append(seen)
            original(accelerator, *args, **kwargs)
            seen["got"] = {
                "distributed_type": accelerator.distributed_type.value,
                "num_processes": accelerator.num_processes,
                "mixed_precision": accelerator.mixed_precision,
                "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
                "device": accelerator.device.type,
                "fsdp_plugin": readable(getattr(accelerator.state, "fsdp_plugin", None)),
            }

        return init

    def _prepare(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare(accelerator: Accelerator, *args: Any, **kwargs: Any) -> Any:
            with self._prepared(accelerator, args) as results:
                result = original(accelerator, *args, **kwargs)
                results += result if len(args) > 1 else [result]
            return result

        return prepare

    def _prepare_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def prepare_model(accelerator: Accelerator, *args: Any, **kwargs: Any) -> Any:
            if self._preparing:  # called by `prepare`
                return original(accelerator, *args, **kwargs)
            given = signature.bind(accelerator, *args, **kwargs).arguments
            # To be looked at only: nothing of it is parallel.
            models = [] if given.get("evaluation_mode") else [given["model"]]
            with self._prepared(accelerator, models) as results:
                result = original(accelerator, *args, **kwargs)
                results += [result] if models else []
            return result

        return prepare_model

    @contextmanager
    def _prepared(self, accelerator: Accelerator, objects: Sequence[Any]) -> Iterator[list[Any]]:
        """What is prepared inside: one result for each object, to be put into the list. Its models are described."""
        before: dict[int, Before] = {}
        with self._record.looking("a model before it is prepared"):
            before |= {place: Before.of(item) for place, item in enumerate(objects) if isinstance(item, nn.Module)}
        known = {id(model) for model in accelerator._models}
        results: list[Any] = []
        self._preparing = True
        try:
            yield results
        finally:
            self._preparing = False
        for place, earlier in before.items():
            if id(results[place]) not in known:  # prepared a second time, which does nothing
                self._describe(accelerator, results[place], earlier)
        if before:
            self._record.write()

    def _describe(self, accelerator: Accelerator, model: nn.Module, before: Before) -> None:
        with self._record.looking(f"the prepared {before.name}"):
            number = self._seen[accelerator]
            own_plugin = self._record.accelerators[number]["given"].get("fsdp_plugin") is not None
            described = watch_model(model, before, accelerator, own_plugin, self._asked, self._record)
            described["accelerator"] = number
            self._record.models.append(described)

    def _backward(self, original: Callable[..., None]) -> Callable[..., None]:
        def backward(accelerator: Accelerator, loss: Any, **kwargs: Any) -> None:
            with self._record.looking("a loss"):
                value = scalar(loss) if len(self._record.backward) < MOST_LOSSES else None
                self._record.backward += [] if value is None else [number(value)]
            original(accelerator, loss, **kwargs)
            self._record.backward_passes += 1

        return backward

    def _log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Of an Accelerator, or of a tracker, which it calls: `log(values, step=None, ...)`."""

        def log(logger: Any, *args: Any, **kwargs: Any) -> Any:
            outer = not self._logging
            if outer:
                values, step = (*args, None, None)[:2]
                with self._record.looking("what is logged"):
                    self._keep_losses(kwargs.get("values", values), kwargs.get("step", step))
            self._logging = True
            try:
                return original(logger, *args, **kwargs)
            finally:
                self._logging = not outer

        return log

    def _keep_losses(self, values: Any, step: Any) -> None:
        for key, value in values.items() if isinstance(values, dict) else ():
            found = scalar(value) if "loss" in str(key).lower() else None
            if found is not None:
                at = {"step": step if isinstance(step, int) else None, "optimizer_steps": self._record.optimizer_steps}
                self._record.logged.append({"key": str(key), **at, "value": number(found)})

    def _step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(optimizer: AcceleratedOptimizer, *args: Any, **kwargs: Any) -> Any:
            result = original(optimizer, *args, **kwargs)
            # Inside `accumulate` most steps do nothing, and a gradient scaler skips those that overflow.
            with self._record.looking("a step"):
                if optimizer.gradient_state.sync_gradients and not optimizer.step_was_skipped:
                    self._steps.ended(optimizer)
            return result

        return step


def replace(replaced: ExitStack, owner: type, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
    """Put `make(original)` in the place of a method until `replaced` is closed."""
    original = vars(owner)[name]
    setattr(owner, name, functools.wraps(original)(make(original)))
    replaced.callback(setattr, owner, name, original)


def subclasses(parent: type) -> Iterator[type]:
    child: type
    for child in parent.__subclasses__():
        yield child
        yield from subclasses(child)
