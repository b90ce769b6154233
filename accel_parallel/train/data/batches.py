"""Batches of packed tokens: what each process sees of the global batch.

B: sequences in a micro-batch of one process, T: tokens in a sequence.
"""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accel_parallel.errors import DataError
from accel_parallel.spec import Training
from accel_parallel.train.data.build import TokenData
from accel_parallel.train.data.order import sample_ids

IGNORED = -100
"""The label that cross-entropy leaves out."""


class TrainBatches:
    """The training data, addressed by how many samples were seen; holds no position of its own.

    Sample i is the tokens `i*T ... i*T + T`, its labels the same shifted by one.
    """

    def __init__(self, data: TokenData, seq_len: int, training: Training, rank: int, world_size: int) -> None:
        self._tokens = data.train
        self._seq_len = seq_len
        self._seed = training.seed
        self._grad_accum_steps = training.grad_accum_steps
        self._micro_batch_size = micro_batch_size(training, world_size)
        self._rank = rank
        self._world_size = world_size
        self.num_samples = (len(data.train) - 1) // seq_len
        if self.num_samples < training.batch_size:
            needed = training.batch_size * seq_len + 1
            raise DataError(
                f"the training text has {len(data.train):,} tokens; one global batch of "
                f"{training.batch_size} sequences of {seq_len} tokens needs {needed:,}",
                hint="raise data.max_tokens or use more text, or lower training.batch_size or model.seq_len",
            )

    def step(self, samples_seen: int) -> list[tuple[Tensor, Tensor]]:
        """This process's micro-batches (tokens, labels) of the step that starts after `samples_seen` samples.

        Each tensor is (B, T) int64.
        """
        micro_batch = self._micro_batch_size
        batches = []
        for m in range(self._grad_accum_steps):
            first = samples_seen + (m * self._world_size + self._rank) * micro_batch
            ids = sample_ids(self._seed, first, micro_batch, self.num_samples)
            batches.append(_shifted(gather(self._tokens, ids, self._seq_len)))
        return batches


class ValBatches:
    """The held-out sequences of one validation, the same number and shape of batches on every process.

    Which sequences those are depends on neither the number of processes nor the accumulation; where they do not fill
    the last batch, it is padded with sequences whose labels are all ignored. Iterating gives `(tokens, labels,
    num_targets)`: (B, T), (B, T) and how many labels of this process's batch count, which may be 0.
    """

    def __init__(
        self, data: TokenData, seq_len: int, training: Training, eval_batches: int, rank: int, world_size: int
    ) -> None:
        available = (len(data.val) - 1) // seq_len
        if available < 1:
            raise DataError(
                f"the held-out text has {len(data.val):,} tokens; one sequence needs {seq_len + 1:,}",
                hint="raise data.val_fraction or data.max_tokens, use more text, or lower model.seq_len",
            )
        self._tokens = data.val
        self._seq_len = seq_len
        self._rank = rank
        self._micro_batch_size = micro_batch_size(training, world_size)
        self._global_batch = self._micro_batch_size * world_size
        self.num_sequences = min(available, eval_batches * training.batch_size)
        self.num_targets_total = self.num_sequences * seq_len

    def __len__(self) -> int:
        return math.ceil(self.num_sequences / self._global_batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        for batch in range(len(self)):
            first = batch * self._global_batch + self._rank * self._micro_batch_size
            ids = np.arange(first, first + self._micro_batch_size, dtype=np.int64)
            real = ids < self.num_sequences
            tokens, labels = _shifted(gather(self._tokens, np.where(real, ids, 0), self._seq_len))
            # Not in place: with one sequence a batch, tokens and labels are views of the same memory.
            labels = labels.masked_fill(torch.from_numpy(~real)[:, None], IGNORED)
            yield tokens, labels, int(real.sum()) * self._seq_len

    @cached_property
    def unigram_entropy(self) -> float:
        """Entropy in nats of the frequencies of exactly the targets of this validation.

        The loss of the best guess that ignores the context; a model that learned anything from it is below.
        """
        targets = self._tokens[1 : self.num_targets_total + 1]
        counts = np.bincount(targets)
        shares = counts[counts > 0] / len(targets)
        return float(-(shares * np.log(shares)).sum())


def micro_batch_size(training: Training, world_size: int) -> int:
    """Sequences per process and forward pass."""
    size, rest = divmod(training.batch_size, training.grad_accum_steps * world_size)
    assert rest == 0, f"batch_size {training.batch_size} over {world_size} x {training.grad_accum_steps}"
    return size


def gather(tokens: NDArray[Any], ids: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    """The samples `ids`, each with the token after its last: (B, T + 1)."""
    return tokens[ids[:, None] * seq_len + np.arange(seq_len + 1)].astype(np.int64)


def _shifted(rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    both = torch.from_numpy(rows)  # (B, T + 1)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()  # (B, T), (B, T)
