"""Whether a rehearsed file learns what one process learns, and whether it comes back from a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accel_parallel.rehearsal.check import Check, table

SAME = "does it learn the same?"
BACK = "does it come back?"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest relative difference from one process.

    float32: the order of sums differs between collectives (run: 4e-7 in the loss, 4e-4 in the norm, 20 steps). bf16:
    every product is rounded to 8 bits, in another order (run: 1.5e-4 and 1.8e-3 between DDP and FSDP).
    """

    precision: str
    loss: float
    grad_norm: float


FLOAT32 = Tolerance("float32", 1e-5, 1e-3)
BFLOAT16 = Tolerance("bf16", 5e-4, 1e-2)


def learns_the_same(steps: Mapping[str, Any], reference: Mapping[str, Any], tolerance: Tolerance) -> Check:
    """Loss and gradient norm of every step against those of one process with the same batch."""
    if not steps or not reference:
        return Check("same_numbers", SAME, None, "no step was trained")
    rows, mismatches, worst = [], [], {"loss": 0.0, "grad_norm": 0.0}
    for step, expected in reference.items():
        got = steps.get(step)
        if got is None:
            mismatches.append(f"step {step} was not reached")
            continue
        row = [step]
        for key, limit in (("loss", tolerance.loss), ("grad_norm", tolerance.grad_norm)):
            off = relative(got[key], expected[key])
            worst[key] = max(worst[key], off)
            row += [f"{got[key]:.6f}", f"{off:.1e}"]
            if not off <= limit:
                name = "loss" if key == "loss" else "gradient norm"
                mismatches.append(
                    f"{name} at step {step} is {got[key]:.6f}, of one process {expected[key]:.6f}: "
                    f"{off:.1e} apart, at most {limit:.0e} is rounding"
                )
        rows.append(row)
    summary = (
        f"{len(rows)} steps, {tolerance.precision}: loss within {worst['loss']:.0e} of one process "
        f"(limit {tolerance.loss:.0e}), gradient norm {worst['grad_norm']:.0e} ({tolerance.grad_norm:.0e})"
    )
    header = ["step", "loss", "apart", "gradient norm", "apart"]
    return Check("same_numbers", SAME, not mismatches, summary, tuple(mismatches[:2]), table(header, rows))


def comes_back(steps: Mapping[str, Any], resumed: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> Check:
    """The last step, once straight through and once after a restart from the checkpoint before it: bit for bit.

    `ranks` is what the processes of the restart told.
    """
    errors = sorted({rank["error"]["message"] for rank in ranks if "error" in rank})
    if errors:
        return Check("comes_back", BACK, False, "the resumed run failed", tuple(errors))
    if not steps or not resumed:
        return Check("comes_back", BACK, None, "nothing was saved and resumed")
    last = max(resumed, key=int)
    straight, again = steps.get(last), resumed[last]
    if straight == again:
        return Check("comes_back", BACK, True, f"step {last} after resuming from step {int(last) - 1}: bit for bit")
    mismatch = f"step {last} after resuming has loss and gradient norm {again}, without a stop {straight}"
    return Check("comes_back", BACK, False, "the resumed run goes another way", (mismatch,))


def relative(got: float, expected: float) -> float:
    """Their distance, relative to what is expected."""
    return abs(got - expected) / abs(expected) if expected else abs(got)
