"""Bytes of fake tensors that are alive at once: what an allocator would have handed out and not taken back."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from accel_parallel.train.probe import tensors_of


class LiveBytes(TorchDispatchMode):
    """A context in which every storage counts from its first operation to its end, resizing included.

    Temporaries inside an operation are not seen: fake operations have none.
    """

    def __init__(self, resting: Iterable[StorageWeakRef]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._watchers: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for reference in resting:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                self.see(storage)
        self.peak = self.live

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(type_, DTensor) for type_ in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of(result):
            self.see(tensor.untyped_storage())
        return result

    def see(self, storage: torch.UntypedStorage) -> None:
        """Count what it holds now."""
        key, size = storage._cdata, storage.nbytes()
        if key not in self._watchers:
            self._watchers[key] = weakref.ref(storage, lambda _: self._end(key))
        self.live += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _end(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        del self._watchers[key]

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Inside, resized storages are seen too: FSDP frees and refills the gathered parameters that way."""
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            if storage.device.type == "meta":
                self.see(storage)
            result = original(storage, size)
            if storage.device.type == "meta":
                self.see(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


def peak_live(step: Callable[[], None], resting: Iterable[StorageWeakRef]) -> int:
    """Most bytes alive at one moment of `step`, among them `resting`, which are there when it begins."""
    live = LiveBytes(resting)
    with live.resizing(), live:
        step()
    return live.peak
