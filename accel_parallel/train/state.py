"""Where training is, and what is due there."""

from dataclasses import dataclass, replace
from typing import Self

from accel_parallel.spec import RunSpec


@dataclass(frozen=True, slots=True)
class TrainState:
    """Optimizer steps done; sequences and tokens seen over all processes."""

    step: int = 0
    samples: int = 0
    tokens: int = 0

    def advance(self, spec: RunSpec) -> Self:
        """The state after one more optimizer step."""
        return replace(
            self,
            step=self.step + 1,
            samples=self.samples + spec.training.batch_size,
            tokens=self.tokens + spec.tokens_per_step,
        )


@dataclass(frozen=True, slots=True)
class Due:
    """What happens after a step. Each but `stop` is collective: every rank."""

    report: bool
    evaluate: bool
    save: bool
    stop: bool

    @classmethod
    def after(cls, step: int, last_step: int, spec: RunSpec) -> Self:
        """A report comes before each evaluation and each save: what is saved has been looked at."""
        stop = step >= last_step
        evaluate = stop or _every(step, spec.logging.eval_every)
        save = stop or _every(step, spec.checkpoint.every)
        report = step == 1 or evaluate or save or _every(step, spec.logging.every)
        return cls(report=report, evaluate=evaluate, save=save, stop=stop)

    def with_stop(self, asked: bool) -> Self:
        """Stop after this step because somebody asked: looked at and saved at once, evaluated when that is done."""
        return replace(self, report=True, evaluate=False, save=True, stop=True) if asked else self


def _every(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
