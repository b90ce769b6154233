"""Text to tokens to the batch of a step.

`prepare` makes or finds the tokens, `TrainBatches` and `ValBatches` cut them. What needs `datasets`, `tokenizers` or
`transformers` imports them where it is used: with a warm cache none of them is loaded.
"""

from accel_parallel.train.data.batches import TrainBatches, ValBatches
from accel_parallel.train.data.build import TokenData, prepare
from accel_parallel.train.data.order import sample_ids

__all__ = ["TokenData", "TrainBatches", "ValBatches", "prepare", "sample_ids"]
