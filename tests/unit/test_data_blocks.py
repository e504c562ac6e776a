"""Tests of the order of samples in blocks. It depends on the seed and the source alone, not on the mesh or on when
tokens become available."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from llmtrain.data import order
from llmtrain.data.batch_shape import BatchShape
from llmtrain.data.loader import Loader, PrefetchLoader
from llmtrain.data.order import block_of, block_of_sample, resize
from llmtrain.errors import DataError, TrainingError
from tests.unit.test_data_loader import MESHES

LENGTH, BATCH = 4, 8
BLOCKS = [10, 20, 40, 40, 40]
"""Numbers of samples in the first blocks in these tests."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "FIRST_BLOCK", BLOCKS[0] * LENGTH)
    monkeypatch.setattr(order, "LARGEST_BLOCK", BLOCKS[-1] * LENGTH)


class SlowTokens:
    """Tokens of a source with `samples` samples. Each token equals its position. Tokens become available `ahead` tokens
    before they are needed; if `ahead` is 0, only when they are waited for."""

    def __init__(self, samples: int, most: int | None = None, ahead: int = 0) -> None:
        self.total, self.ahead = samples * LENGTH + 1, ahead
        self.max_tokens = sys.maxsize if most is None else most * LENGTH + 1
        self.there, self.waits = min(ahead, self.total), []

    def __len__(self) -> int:
        return self.there

    def wait_for(self, tokens: int) -> int:
        if min(tokens, self.max_tokens) > self.there:
            self.waits.append(tokens)
            self.there = min(tokens + self.ahead, self.total, self.max_tokens)
        return self.there

    def window(self, start: int, length: int) -> np.ndarray:
        assert start + length <= self.there, "tokens are read before they are available"
        return np.arange(start, start + length, dtype=np.uint16)

    def is_waiting(self, seconds: float) -> bool:
        return False


def loader(tokens: object, replica: int = 0, replicas: int = 1, shard_rank: int = 0, shard: int = 1, **keys: int):
    shape = BatchShape(LENGTH, BATCH, 1, 7, replica, replicas, shard_rank, shard)
    return Loader(tokens, replace(shape, **keys), in_blocks=True)


def steps(tokens: list, replicas: int, shard: int, count: int) -> list[list[int]]:
    """Return the samples of each step in rank order. Each rank reads its own element of `tokens`."""
    ranks = [
        loader(mine, r, replicas, s, shard)
        for mine, (r, s) in zip(tokens, itertools.product(range(replicas), range(shard)), strict=False)
    ]
    return [[int(row[0]) // LENGTH for rank in ranks for batch in rank.next() for row in batch] for _ in range(count)]


def test_blocks_follow_one_another_and_double() -> None:
    assert (order.FIRST_BLOCK, order.LARGEST_BLOCK) == (40, 160)
    ends = list(itertools.accumulate(BLOCKS, initial=0))
    for sample in range(ends[-1]):
        number = next(number for number, end in enumerate(ends) if end > sample)
        assert block_of_sample(sample, LENGTH) == (ends[number - 1], ends[number])
        assert block_of_sample(sample, 1) == block_of(sample), "a sample of one token"
    for length in (3, 7, 11):  # no block is a multiple of these
        starts = {block_of_sample(sample, length) for sample in range(60)}
        assert all(one[1] == other[0] for one, other in itertools.pairwise(sorted(starts)))


@pytest.mark.parametrize("most", [None, 90], ids=["a file", "a hub dataset"])
@pytest.mark.parametrize("samples", [90, 24])
def test_the_order_is_equal_for_every_timing_and_mesh(samples: int, most: int | None) -> None:
    count = 3 * samples // BATCH
    expected = steps([SlowTokens(samples, most, ahead=10**6)], 1, 1, count)
    for ahead in (0, 1, 37, 300):
        for replicas, shard in MESHES:
            ranks = [SlowTokens(samples, most, ahead=(number + 1) * ahead) for number in range(4)]
            assert steps(ranks, replicas, shard, count) == expected
    taken = list(itertools.chain(*expected))
    ends = [min(end, samples) for end in itertools.accumulate(BLOCKS, initial=0)]
    for start, end in itertools.pairwise(ends):
        assert sorted(taken[start:end]) == list(range(start, end))
    assert taken[:10] != sorted(taken[:10]) and taken[10:24] != sorted(taken[10:24])
    second = taken[samples : 2 * samples]
    assert sorted(second) == list(range(samples)) and max(second[:10]) >= 10, "a later epoch has no blocks"


def test_nothing_is_waited_for_before_it_is_needed() -> None:
    tokens = SlowTokens(150)
    ranks = [loader(tokens, r, 2) for r in range(2)]
    assert not tokens.waits
    for rank in ranks:
        rank.next()
    assert tokens.there == 10 * LENGTH + 1
    ranks[0].next()
    ranks[0].next()
    assert tokens.there == 30 * LENGTH + 1
    ranks[0].next()
    assert tokens.there == 70 * LENGTH + 1, "the first rank also waits for the tokens that the last rank reads"
    for _ in range(6):
        ranks[0].next()
    assert tokens.there == 110 * LENGTH + 1
    assert len(ranks[0].order._parts) == 1, "blocks that have been read are forgotten"


@pytest.mark.parametrize("before", [1, 4, 9, 12])
def test_resume_in_the_middle_with_a_small_state(before: int) -> None:
    first = loader(SlowTokens(90), 1, 2)
    for _ in range(before):
        first.next()
    state = json.loads(json.dumps(first.state_dict()))
    assert state == {"position": before * BATCH}
    second = loader(SlowTokens(90), 1, 2)
    second.load_state_dict(state)
    for _ in range(14):
        assert all(torch.equal(a, b) for a, b in zip(first.next(), second.next(), strict=True))


def entries(made: Loader, count: int) -> list[int]:
    return [made.order.sample(entry) for entry in range(count)]


@pytest.mark.parametrize("old", [24, 30, 60])
def test_a_longer_run_goes_on_with_the_order_of_the_shorter_one(old: int) -> None:
    """A block that the shorter run has cut stays cut, however much was tokenized by then."""
    short = loader(SlowTokens(200, most=old))
    before = entries(short, old)
    short.next()
    state = resize(short.state_dict(), old, 100)
    longer = [loader(SlowTokens(200, most=100, ahead=ahead)) for ahead in (0, 10**6)]
    for made in longer:
        made.load_state_dict(state)
    one, other = (entries(made, 150) for made in longer)
    assert one == other and one[:old] == before and sorted(one[:100]) == list(range(100))
    assert longer[0].state_dict() == {"position": BATCH, "sizes": [old, 100]}
    assert sorted(one[old:70]) == list(range(old, 70)), "blocks end where they would have ended"
    ended = loader(SlowTokens(20, most=100))
    ended.load_state_dict(state)
    assert entries(ended, 20) == entries(loader(SlowTokens(20, most=old)), 20), "a source that ends earlier"


def test_a_source_that_ends_before_one_batch_is_an_error() -> None:
    made = loader(SlowTokens(BATCH - 1))
    with pytest.raises(DataError, match="training data: 29 tokens, but one step of 8 sequences of 4 needs 33"):
        made.next()
    assert loader(SlowTokens(BATCH)).next()
    with pytest.raises(DataError, match="sequences of 4 needs 33"):
        loader(SlowTokens(90, most=BATCH - 1))


def test_a_source_that_is_complete_has_the_same_order_without_waiting() -> None:
    complete = SlowTokens(90, most=90, ahead=90 * LENGTH + 1)
    assert steps([complete], 1, 1, 20) == steps([SlowTokens(90)], 1, 1, 20) and not complete.waits


def test_a_wait_for_text_is_no_wait_for_the_disk(capsys: pytest.CaptureFixture[str]) -> None:
    class Answers:
        left = 3

        def is_waiting(self, seconds: float) -> bool:
            self.left -= 1
            return self.left >= 0

    made = loader(SlowTokens(90))
    ahead = PrefetchLoader(made, timeout_seconds=0.01)
    made.tokens = Answers()  # no batch ever arrives
    with pytest.raises(TrainingError, match="does not answer"):
        ahead._receive()
    assert made.tokens.left == -2, "asked each time a timeout has passed"
    assert capsys.readouterr().err.count("waiting for the disk") == 1
