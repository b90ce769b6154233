"""The training loop. It does not know how the model is spread over the processes.

Legend: B sequences of this process's micro-batch, T tokens.
"""

from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from accel_parallel.train.checkpoint import Checkpoints
from accel_parallel.train.control import Control
from accel_parallel.train.data import TokenData, TrainBatches, ValBatches
from accel_parallel.train.evaluate import evaluate
from accel_parallel.train.initialize import initialize
from accel_parallel.train.meter import Meter
from accel_parallel.train.model import TransformerLM
from accel_parallel.train.optimize import build_optimizer, set_lr
from accel_parallel.train.report import Reporter
from accel_parallel.train.runtime import Runtime
from accel_parallel.train.state import Due, TrainState


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a launch ended, the same on every process. `tokens_per_sec` leaves out evaluation and saving."""

    model: nn.Module
    optimizer: Optimizer
    state: TrainState
    val_loss: float
    held_out: ValBatches
    tokens_per_sec: float
    checkpoint: Path


def train(
    runtime: Runtime,
    data: TokenData,
    checkpoints: Checkpoints,
    reporter: Reporter,
    control: Control,
    *,
    stop_at: int | None = None,
) -> Outcome:
    """Collective. Train from the newest of `checkpoints` to the last step, or to `stop_at`.

    Raises TrainingError when a loss is not finite, MismatchError when what runs is not what was asked for,
    RunError when a checkpoint cannot be written or read.
    """
    spec, accelerator = runtime.spec, runtime.accelerator
    batches = TrainBatches(data, spec.model.seq_len, spec.training, runtime.rank, runtime.world_size)
    held_out = ValBatches(
        data, spec.model.seq_len, spec.training, spec.logging.eval_batches, runtime.rank, runtime.world_size
    )
    fresh = TransformerLM(spec.model)
    initialize(fresh, runtime, restored_later=checkpoints.found())  # collective: every rank
    model, optimizer = runtime.prepare(fresh, build_optimizer(fresh, spec.training), *batches.step(0)[0])
    state = checkpoints.restore(model, optimizer, reporter.say)
    reporter.start(state, held_out.unigram_entropy)
    last_step = min(spec.training.steps, stop_at or spec.training.steps)
    meter, val_loss, done = Meter(runtime), None, state.step >= last_step

    while not done:
        step = state.step + 1
        control.begin(step)
        agreed = runtime.agree(control.stop_asked, checkpoints.failing)  # collective: every rank
        lr = set_lr(optimizer, step, spec.training)
        for tokens, labels in batches.step(state.samples):  # (B, T) each
            with accelerator.accumulate(model):
                loss = model(*runtime.to_device(tokens, labels))
                accelerator.backward(loss)
            meter.add(loss, step)
        meter.end_step(runtime.clip(model), step)
        checkpoints.wait_until_copied()
        optimizer.step()
        optimizer.zero_grad()
        state = state.advance(spec)

        stop_asked, save_failed = agreed()
        due = Due.after(step, last_step, spec).with_stop(stop_asked)
        if due.report:
            reporter.train(state, meter.read(), lr)  # collective: every rank
        if due.evaluate:
            val_loss = evaluate(runtime, model, held_out)  # collective: every rank
            reporter.evaluation(state, val_loss)
        if due.save:
            reporter.saved(checkpoints.save(model, optimizer, state))  # collective: every rank
        reporter.saved(checkpoints.ended(wait=due.stop or save_failed))
        if due.evaluate or due.save:
            meter.restart_clock()
        val_loss = val_loss if due.evaluate else None
        done = due.stop

    return Outcome(
        model=model,
        optimizer=optimizer,
        state=state,
        val_loss=evaluate(runtime, model, held_out) if val_loss is None else val_loss,
        held_out=held_out,
        tokens_per_sec=meter.mean_tokens_per_sec,
        checkpoint=checkpoints.path(state),
    )
