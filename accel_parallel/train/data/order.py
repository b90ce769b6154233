"""Which sample comes when: a pure function of the seed and of how many samples were seen."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def sample_ids(seed: int, start: int, count: int, num_samples: int) -> NDArray[np.int64]:
    """The samples at positions `start ... start + count - 1` of an endless stream over `num_samples` samples.

    Position k lies in epoch `k // num_samples`; each epoch is a permutation of its own. The result does not depend on
    how the stream is cut into batches, so a run may go on with another batch size or number of processes.
    """
    ids = np.empty(count, dtype=np.int64)
    filled = 0
    while filled < count:
        epoch, offset = divmod(start + filled, num_samples)
        taken = min(count - filled, num_samples - offset)
        ids[filled : filled + taken] = _permutation(seed, epoch, num_samples)[offset : offset + taken]
        filled += taken
    return ids


# Two, because a batch may straddle two epochs.
@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, num_samples: int) -> NDArray[np.int64]:
    # RandomState is frozen for good (NEP 19), Generator's streams may change between versions of numpy:
    # a run that is resumed after an upgrade must not see its data in another order.
    generator = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(num_samples).astype(np.int64)
