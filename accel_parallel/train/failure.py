"""What went wrong in a worker, as one line: the causes that have a remedy, and those that are only consequences."""

import re

from accel_parallel.errors import AccelParallelError, Problem, TrainingError

_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)
_ASKED_FOR = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
# gloo's words when the process at the other end is gone (gloo/transport/tcp), and NCCL's watchdog's.
_PEER_LOST = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|remote process exited"
)


def explain(error: BaseException, rank: int, step: int | None) -> AccelParallelError | None:
    """The error to show instead of `error`, if its cause is known. `step` as in `Control`."""
    if is_out_of_memory(error):
        asked = _ASKED_FOR.search(str(error))
        message = f"out of memory {where(rank, step)}" + (f": tried to allocate {asked[1]}" if asked else "")
        ours = "lower training.batch_size, raise training.grad_accum_steps, or model.activation_checkpointing: block"
        if not step:
            ours = "a smaller model or batch, or a strategy that shards more"
        return TrainingError(message, hint=ours)
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Of an accelerator or of the host."""
    # torch's errors are RuntimeErrors.
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error))))


def crash(error: BaseException, rank: int, step: int | None) -> Problem:
    """The line of an error that nobody expected. One that only says that another process has gone is marked."""
    try:
        text = str(error).strip().splitlines()
    except Exception:  # its own words fail too
        text = []
    if isinstance(error, RuntimeError) and _PEER_LOST.search("\n".join(text)):
        return Problem(f"lost the connection to another process {where(rank, step)}", code="peer-lost")
    return Problem(
        f"{type(error).__name__}: {_shown(text[0]) if text else 'no message'} ({where(rank, step)})", code="crash"
    )


def _shown(text: str) -> str:
    """What a terminal would obey is not shown to it."""
    return "".join(character if character.isprintable() else "?" for character in text)


def where(rank: int, step: int | None) -> str:
    if step is None:
        return f"on rank {rank}"
    return f"on rank {rank} at step {step}" if step else f"on rank {rank} before the first step"
