"""One process of a world of any size, on tensors without memory: what a training step would cost there.

The others do not exist, and their collectives return at once; everything else is the code that trains.
"""

from accel_parallel.train.scale.simulate import simulate
from accel_parallel.train.scale.world import World

__all__ = ["World", "simulate"]
