"""Real optimizer steps, and what the processes tell each other between two of them."""

from typing import Any
from weakref import WeakKeyDictionary

from accelerate.optimizer import AcceleratedOptimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode

from accel_parallel.train.probe import Collectives, Traffic, storage_bytes
from accel_parallel.train.watch_script.record import Record

SETTLED = 2
"""Steps before the first window: DDP rearranges its buckets after its first backward pass (see probe.py)."""
MOST_WINDOWS = 3

Counts = dict[tuple[str, int], tuple[int, int]]
"""Number and bytes of the collectives so far, by kind and group size."""


class Steps:
    """Counts the collectives from the end of one step of an optimizer to the end of its next: one window.

    All windows are of one optimizer, the first that gets that far; what other optimizers do meanwhile is inside. A
    window may hold what the script does once in a while (it evaluates, saves, begins an epoch): hence several.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._described: WeakKeyDictionary[AcceleratedOptimizer, dict[str, Any]] = WeakKeyDictionary()
        self._before: WeakKeyDictionary[AcceleratedOptimizer, tuple[Counts, int]] = WeakKeyDictionary()
        self._chosen: dict[str, Any] | None = None
        self._collectives = Collectives()
        self._counting = False

    def ended(self, optimizer: AcceleratedOptimizer) -> None:
        """A step that changed parameters has just ended; the gradients are still there."""
        record = self._record
        record.optimizer_steps += 1
        if optimizer not in self._described:
            self._described[optimizer] = {"class": type(optimizer.optimizer).__name__, "steps": 0}
            record.optimizers.append(self._described[optimizer])
        described = self._described[optimizer]
        described["steps"] += 1
        if described["steps"] <= SETTLED + MOST_WINDOWS:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            described["gradient_bytes"] = storage_bytes([parameter.grad for parameter in parameters])
            described["state_bytes"] = storage_bytes(list(optimizer.state.values()))
        self._count(optimizer, described)
        if described["steps"] <= SETTLED + MOST_WINDOWS:
            record.write()

    def end(self) -> None:
        """Count no more."""
        if self._counting and _get_current_dispatch_mode() is self._collectives:
            self._collectives.__exit__(None, None, None)
            self._counting = False

    def _count(self, optimizer: AcceleratedOptimizer, described: dict[str, Any]) -> None:
        windows, step = self._record.windows, described["steps"]
        if step < SETTLED or self._record.no_windows:
            return
        if len(windows) == MOST_WINDOWS:
            self.end()
            return
        if not self._counting:
            if _get_current_dispatch_mode() is not None:
                self._record.no_windows = "the script takes its steps inside a TorchDispatchMode of its own"
                return
            self._collectives.__enter__()
            self._counting = True
        now = counts(self._collectives.traffic)
        if optimizer in self._before and (self._chosen is None or self._chosen is described):
            self._chosen = described
            before, passes = self._before[optimizer]
            windows.append(
                {
                    "optimizer": [item is described for item in self._record.optimizers].index(True),
                    "from_step": step - 1,
                    "to_step": step,
                    "backward_passes": self._record.backward_passes - passes,
                    "collectives": difference(now, before),
                }
            )
        self._before[optimizer] = (now, self._record.backward_passes)
        if len(windows) == MOST_WINDOWS:
            self.end()


def counts(traffic: list[Traffic]) -> Counts:
    return {(item.kind, item.group_size): (item.count, item.tensor_bytes) for item in traffic}


def difference(now: Counts, before: Counts) -> list[dict[str, Any]]:
    """What came in between, in a stable order."""
    found = []
    for key in sorted(now):
        count, size = (a - b for a, b in zip(now[key], before.get(key, (0, 0)), strict=True))
        if count:
            traffic = Traffic("", *key, count, size)
            found.append({name: value for name, value in traffic.to_dict().items() if name != "phase"})
    return found
