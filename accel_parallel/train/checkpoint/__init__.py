"""Checkpoints through torch.distributed.checkpoint: one format for every strategy and number of processes."""

from accel_parallel.train.checkpoint.publish import VERSIONS
from accel_parallel.train.checkpoint.store import Checkpoints
from accel_parallel.train.checkpoint.write import Saved

__all__ = ["VERSIONS", "Checkpoints", "Saved"]
