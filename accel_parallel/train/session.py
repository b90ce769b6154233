"""One launched process from start to end: data, process group, run directory, loop, summary."""

import os
import platform
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_parallel.checkpoints import complete_checkpoints
from accel_parallel.errors import AccelParallelError, RunError, TrainingError
from accel_parallel.files import write_atomic
from accel_parallel.locks import WORKERS, Lock, hold
from accel_parallel.metrics import to_line
from accel_parallel.redact import redact_command, redact_variables
from accel_parallel.runs import Run, discard_partial_checkpoints, open_run
from accel_parallel.say import say as say_aloud
from accel_parallel.spec import RunSpec
from accel_parallel.train.checkpoint import VERSIONS, Checkpoints
from accel_parallel.train.control import Control
from accel_parallel.train.data import TokenData, prepare
from accel_parallel.train.generate import generate
from accel_parallel.train.initialize import other_tokenizer
from accel_parallel.train.loop import Outcome, train
from accel_parallel.train.meter import peak_memory_gib
from accel_parallel.train.report import Reporter
from accel_parallel.train.runtime import Runtime, describe, local_rank

SAMPLE_PROMPT_TOKENS = 24
SAMPLE_TOKENS = 48
# Only these say something about a run; the rest of an environment may hold secrets.
RECORDED_VARIABLES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "NCCL_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line of a worker says besides the specification."""

    run: Path | None = None
    fresh: bool = False
    force_cpu: bool = False
    keep_precision: bool = False
    stop_at: int | None = None


def run_session(spec: RunSpec, options: Options, control: Control) -> dict[str, Any] | None:
    """Collective. Train as the launcher's environment says; the summary on the main process, None on the others."""
    # Deprecations and the like of torch's own modules, which nobody who launches can do anything about.
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.")
    warnings.filterwarnings("ignore", message="When using ``NO_SHARD``")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # of a single process, while saving
    say = say_aloud if int(os.environ.get("RANK", "0")) == 0 else _silent
    # On each machine the first process prepares, and one of those that wait says so.
    heard = say_aloud if local_rank() < 2 else _silent
    data = prepare(spec.data, spec.model.vocab_size, leader=local_rank() == 0, say=heard)
    runtime = Runtime.start(spec, force_cpu=options.force_cpu, keep_precision=options.keep_precision)
    same_data(runtime, data)
    for line in (*runtime.overruled, *(f"on CPU: {item}" for item in runtime.substitutions)):
        say(line)
    run = agree_on_run(runtime, options)
    if run.note:
        say(run.note)
    model = runtime.spec.model.shape
    say(f"{model.total_parameters:,} parameters, {runtime.spec.tokens_per_step:,} tokens a step, the first is slow")
    checkpoints = Checkpoints(run, runtime, data.fingerprint)
    starts_from = runtime.spec.model.init_from
    if starts_from and not checkpoints.found():
        say(other_tokenizer(runtime.spec.model, data, runtime.spec.data.tokenizer) or f"starts from {starts_from}")
    with tracking(runtime, data, run) as reporter:
        try:
            outcome = train(runtime, data, checkpoints, reporter, control, stop_at=options.stop_at)
        except TrainingError as error:
            with suppress(RunError):
                reporter.saved(checkpoints.ended(wait=True))  # collective: every rank
            raise TrainingError(error.message, hint=way_back(error, run)) from None
        summary = summarize(runtime, data, run, outcome, reporter)
    runtime.end()
    return summary if runtime.is_main else None


def way_back(error: TrainingError, run: Run) -> str:
    """The newest checkpoint whose weights are known to work: a whole step was computed from them without trouble."""
    good = [path for step, path in complete_checkpoints(run.path).items() if error.step and step < error.step - 1]
    where = f"last good checkpoint: {good[-1]}" if good else "no good checkpoint was written yet"
    return f"{where}; lower training.lr or look at the data"


def same_data(runtime: Runtime, data: TokenData) -> None:
    """Collective. Raises RunError when the machines do not hold the same tokens."""
    prints = runtime.gather_objects(data.fingerprint)
    odd = [rank for rank, print_ in enumerate(prints) if print_ != prints[0]]
    if odd:
        raise RunError(
            f"rank {odd[0]} holds other tokens than rank 0: the machines read different text",
            hint="prepare once with ACCEL_PARALLEL_CACHE on a file system they share",
        )


def agree_on_run(runtime: Runtime, options: Options) -> Run:
    """Collective. The main process opens the run directory, the others are told."""
    answer: Run | AccelParallelError
    try:
        name = runtime.asked.strategy_name
        answer = _NOBODY
        if runtime.is_main:
            answer = open_run(runtime.spec, name, explicit=options.run, fresh=options.fresh, claim=claim)
    except AccelParallelError as error:
        answer = error
    answer = runtime.tell_all(answer)
    if isinstance(answer, AccelParallelError):
        raise answer
    return answer


def claim(path: Path) -> None:
    """Keep every other launch out of the directory until this process ends, and clear what a killed one left."""
    _HELD.append(hold(path, WORKERS))
    discard_partial_checkpoints(path)


_HELD: list[Lock] = []
_NOBODY = Run(Path(), continues=False)


def tracking(runtime: Runtime, data: TokenData, run: Run) -> Reporter:
    """The reporter of this run, with Accelerate's trackers started if any were asked for."""
    runtime.start_trackers(run.path)
    return Reporter(
        run,
        total_steps=runtime.spec.training.steps,
        active=runtime.is_main,
        track=lambda numbers, step: runtime.accelerator.log(numbers, step=step),
        environment=lambda: environment(runtime, data),
    )


def environment(runtime: Runtime, data: TokenData) -> dict[str, Any]:
    """What ran where: versions, what was asked, substituted and observed. No secrets: named variables, redacted."""
    recorded = {key: value for key, value in os.environ.items() if key.startswith(RECORDED_VARIABLES)}
    return {
        "versions": {**VERSIONS, "python": platform.python_version()},
        "command": redact_command(sys.argv),
        "host": platform.node(),
        "variables": redact_variables(recorded),
        "data": {
            "fingerprint": data.fingerprint,
            "training_tokens": len(data.train),
            "held_out_tokens": len(data.val),
            "num_samples": (len(data.train) - 1) // runtime.spec.model.seq_len,
        },
        **describe(runtime),
    }


def summarize(runtime: Runtime, data: TokenData, run: Run, outcome: Outcome, reporter: Reporter) -> dict[str, Any]:
    """Collective. Everything the closing summary shows, also written to `summary.json`."""
    prompt = [int(token) for token in data.val[:SAMPLE_PROMPT_TOKENS]]
    continuation = generate(
        outcome.model,
        prompt,
        max_new_tokens=SAMPLE_TOKENS,
        seq_len=runtime.spec.model.seq_len,
        vocab_size=data.vocab_size,
        device=runtime.device,
        seed=runtime.spec.training.seed,
    )
    peaks = runtime.gather_objects(peak_memory_gib(runtime.device))
    if not runtime.is_main:
        return {}
    first_loss, last_loss = reporter.losses(outcome.state.step)
    summary = {
        "run": str(run.path),
        "strategy": runtime.asked.strategy_name,
        "world_size": runtime.world_size,
        "device": runtime.device.type,
        "step": outcome.state.step,
        "steps": runtime.spec.training.steps,
        "tokens": outcome.state.tokens,
        "first_train_loss": first_loss,
        "last_train_loss": last_loss,
        "val_loss": outcome.val_loss,
        "unigram_entropy": outcome.held_out.unigram_entropy,
        "val_tokens": outcome.held_out.num_targets_total,
        "tokens_per_sec": outcome.tokens_per_sec,
        "peak_memory_gib": peaks,
        "checkpoint": str(outcome.checkpoint),
        "prompt": data.decode(prompt),
        "sample": data.decode(continuation),
    }
    write_atomic(run.path / "summary.json", to_line("summary", summary) + "\n")
    return summary


def _silent(text: str) -> None:
    return None
