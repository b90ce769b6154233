"""From the launcher's environment to a prepared model that is what was asked for.

The only package that knows how Accelerate behaves; the loop sees devices, collectives and a model, never a strategy.
"""

from accel_parallel.train.runtime.process import Runtime, describe, local_rank

__all__ = ["Runtime", "describe", "local_rank"]
