"""From what a rehearsal saw to its answers."""

from collections.abc import Mapping
from typing import Any

from accel_parallel.errors import AccelParallelError
from accel_parallel.metrics import format_processes
from accel_parallel.rehearsal.check import Check, Rehearsal
from accel_parallel.rehearsal.configuration import ASKED, is_what_was_asked
from accel_parallel.rehearsal.numbers import BACK, BFLOAT16, FLOAT32, SAME, comes_back, learns_the_same
from accel_parallel.rehearsal.sharding import SENDS, SHARDED, Promise, is_sharded, sends_what_it_should
from accel_parallel.spec import RunSpec

_OTHERS = {"sharded": SHARDED, "same_numbers": SAME, "sends": SENDS, "comes_back": BACK}


def judge(
    name: str,
    spec: RunSpec,
    environment: Mapping[str, str],
    facts: Mapping[str, Any],
    reference: Mapping[str, Any],
    *,
    keep_precision: bool,
) -> Rehearsal:
    """`environment` is what the launcher exports for the file, `reference` the steps of one process."""
    low = keep_precision and spec.distributed.mixed_precision == "bf16"
    world = {"WORLD_SIZE": str(spec.num_processes), "LOCAL_WORLD_SIZE": str(spec.distributed.processes_per_machine)}
    # On CPUs it is float32 that is computed in, whatever was asked for.
    precision = {} if keep_precision else {"ACCELERATE_MIXED_PRECISION": "no"}
    promise = Promise.of({**environment, **world, **precision}, spec.model.shape)
    ranks = facts["ranks"]
    checks = (
        is_what_was_asked(spec.num_processes, promise.plan.asked.fsdp, facts),
        is_sharded(promise, ranks),
        learns_the_same(facts["steps"], reference, BFLOAT16 if low else FLOAT32),
        sends_what_it_should(promise, ranks),
        comes_back(facts["steps"], facts["steps_resumed"], facts["resumed"]),
    )
    title = f"{name}, {format_processes(spec.num_processes)}"
    return Rehearsal(name, title, checks, facts["seconds"], dict(facts), _notes(facts))


def refused(name: str, error: AccelParallelError) -> Rehearsal:
    """A file that cannot be started at all."""
    mismatches = tuple(map(str, error.problems))
    others = [Check(key, question, None, "nothing was started") for key, question in _OTHERS.items()]
    return Rehearsal(name, name, [Check("asked", ASKED, False, "cannot be started", mismatches), *others], 0.0)


def _notes(facts: Mapping[str, Any]) -> list[str]:
    first = [rank["seconds"] for rank in facts["ranks"] if "seconds" in rank]
    return [f"first step {max(first):.1f} s after the start"] if first else []
