"""Which tokens each process sees, and when."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from accel_parallel.errors import DataError
from accel_parallel.spec import Training
from accel_parallel.train.data import TokenData, TrainBatches, ValBatches, sample_ids

SEQ_LEN = 4


@pytest.fixture
def data(tmp_path: Path) -> TokenData:
    """27 training samples and 11 held-out ones of 4 tokens; token i of a split is i (mod 90)."""
    sizes = {"train": 27 * SEQ_LEN + 3, "val": 11 * SEQ_LEN + 1}
    for split, size in sizes.items():
        (np.arange(size) % 90).astype("<u2").tofile(tmp_path / f"{split}.bin")
    manifest = {"dtype": "uint16", "fingerprint": "f", **{split: {"tokens": size} for split, size in sizes.items()}}
    return TokenData(tmp_path, manifest)


def training(batch_size: int, grad_accum_steps: int = 1, seed: int = 7) -> Training:
    return Training(batch_size=batch_size, grad_accum_steps=grad_accum_steps, seed=seed)


def seen(data: TokenData, setup: Training, world_size: int, start: int, steps: int) -> list[list[int]]:
    """Global batches over all processes, in the order of the stream; a sample is told by its first token."""
    batches = []
    for step in range(steps):
        ranks = [
            TrainBatches(data, SEQ_LEN, setup, rank, world_size).step(start + step * setup.batch_size)
            for rank in range(world_size)
        ]
        micro_batches = zip(*ranks, strict=True)
        batches.append([int(row[0]) for micro in micro_batches for tokens, _ in micro for row in tokens])
    return batches


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


def test_each_epoch_is_a_permutation_of_its_own() -> None:
    n = 10
    stream = sample_ids(seed=3, start=0, count=3 * n, num_samples=n).reshape(3, n)
    assert [sorted(epoch) for epoch in stream.tolist()] == [list(range(n))] * 3
    assert len({tuple(epoch) for epoch in stream.tolist()}) == 3
    assert not np.array_equal(stream[0], sample_ids(4, 0, n, n))


@pytest.mark.parametrize("start", [0, 1, 9, 10, 17, 25])
def test_a_stream_does_not_depend_on_where_it_is_cut(start: int) -> None:
    whole = sample_ids(seed=3, start=0, count=60, num_samples=10)
    assert np.array_equal(sample_ids(3, start, 25, 10), whole[start : start + 25])


def test_the_order_is_the_same_in_every_version() -> None:
    # A run that is resumed after an upgrade of numpy must go on where it was.
    assert sample_ids(1234, 0, 8, 8).tolist() == [1, 6, 4, 0, 3, 5, 2, 7]
    assert sample_ids(1234, 8, 8, 8).tolist() == [6, 7, 4, 2, 0, 1, 5, 3]


@pytest.mark.parametrize("grad_accum_steps", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_world_size_sees_the_same_global_batches(data: TokenData, world_size: int, grad_accum_steps: int) -> None:
    expected = seen(data, training(24), world_size=1, start=0, steps=6)
    assert seen(data, training(24, grad_accum_steps), world_size, start=0, steps=6) == expected
    assert Counter(flat(expected)[:27]) == Counter(sample * SEQ_LEN % 90 for sample in range(27))


def test_resuming_equals_going_straight_on(data: TokenData) -> None:
    straight = seen(data, training(8), world_size=2, start=0, steps=9)
    assert seen(data, training(8), world_size=4, start=40, steps=4) == straight[5:]


def test_another_batch_size_goes_on_at_the_next_sample(data: TokenData) -> None:
    stream = flat(seen(data, training(8), 1, start=0, steps=9))
    assert flat(seen(data, training(12), 2, start=24, steps=4)) == stream[24:72]


def test_labels_are_the_tokens_after(data: TokenData) -> None:
    ((tokens, labels),) = TrainBatches(data, SEQ_LEN, training(27), 0, 1).step(0)
    assert tokens.shape == labels.shape == (27, SEQ_LEN)
    assert tokens.dtype == labels.dtype == torch.int64
    assert tokens.is_contiguous() and labels.is_contiguous()
    assert torch.equal((tokens + 1) % 90, labels)
    assert torch.equal(tokens[:, 1:], labels[:, :-1])


def test_an_epoch_smaller_than_a_batch_is_refused(data: TokenData) -> None:
    assert TrainBatches(data, SEQ_LEN, training(27), 0, 1).num_samples == 27
    with pytest.raises(DataError, match=r"has 111 tokens; .* 28 sequences of 4 tokens needs 113 .*data.max_tokens"):
        TrainBatches(data, SEQ_LEN, training(28), 0, 1)


@pytest.mark.parametrize(("eval_batches", "sequences"), [(1, 4), (2, 8), (3, 11), (99, 11)])
@pytest.mark.parametrize(("world_size", "accum"), [(1, 1), (2, 1), (4, 1), (1, 4), (2, 2)])
def test_validation_is_the_same_on_every_world_size(
    data: TokenData, world_size: int, accum: int, eval_batches: int, sequences: int
) -> None:
    ranks = [ValBatches(data, SEQ_LEN, training(4, accum), eval_batches, r, world_size) for r in range(world_size)]
    runs = [list(rank) for rank in ranks]
    assert {len(run) for run in runs} == {len(ranks[0])}
    targets: list[int] = []
    for step in zip(*runs, strict=True):
        for tokens, labels, num_targets in step:
            assert tokens.shape == labels.shape == (4 // (world_size * accum), SEQ_LEN)
            assert type(num_targets) is int and num_targets == int((labels != -100).sum())
            real = labels[:, 0] != -100
            assert torch.equal((tokens[real] + 1) % 90, labels[real])
            assert bool((labels[~real] == -100).all())
            targets += labels[real].flatten().tolist()
    assert targets == data.val[1 : sequences * SEQ_LEN + 1].tolist()
    assert all(rank.num_targets_total == len(targets) for rank in ranks)


def test_a_process_may_have_nothing_but_padding(data: TokenData) -> None:
    batches = list(ValBatches(data, SEQ_LEN, training(8), 99, rank=3, world_size=4))
    assert [num_targets for _, _, num_targets in batches] == [2 * SEQ_LEN, 0]


def test_padding_reaches_the_labels_only(data: TokenData) -> None:
    """With one sequence a batch the two were views of the same memory: the padding became token ids of -100."""
    for rank in range(8):
        for tokens, labels, num_targets in ValBatches(data, SEQ_LEN, training(8), 99, rank=rank, world_size=8):
            assert tokens.min() >= 0
            assert (labels == -100).all() == (num_targets == 0)


def test_unigram_entropy_by_hand(tmp_path: Path) -> None:
    # Two sequences of 2: the targets are 5 5 6 7; the first and the last token are none.
    np.array([9, 5, 5, 6, 7, 9], dtype="<u2").tofile(tmp_path / "val.bin")
    data = TokenData(tmp_path, {"dtype": "uint16"})
    batches = ValBatches(data, 2, training(1), 2, 0, 1)
    assert batches.unigram_entropy == pytest.approx(-(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25)))
    assert ValBatches(data, 2, training(1), 1, 0, 1).unigram_entropy == 0.0


def test_held_out_text_without_a_whole_sequence_is_refused(data: TokenData) -> None:
    with pytest.raises(DataError, match=r"has 45 tokens; one sequence needs 46 .*data.val_fraction"):
        ValBatches(data, 45, training(1), 1, 0, 1)
