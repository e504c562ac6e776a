"""Tests of mixtures: every block has the exact shares, each text is read in its own order, and the order is the same
on every mesh and after a resume."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from llmtrain.data.batch_shape import BatchShape
from llmtrain.data.dataset import TokenShards
from llmtrain.data.loader import Loader, PrefetchLoader
from llmtrain.data.mixture import BLOCK, MixtureOrder, max_entries_of, shares_of
from llmtrain.data.mixture_loader import MixedShards, MixtureLoader
from llmtrain.data.order import SampleOrder, merge_cursors
from llmtrain.errors import DataError, TrainingError

LENGTH, BATCH = 4, 8
WEIGHTS = {"a": 7.0, "b": 2.5, "c": 0.5}
SAMPLES = {"a": 90, "b": 40, "c": 11}
MESHES = [(1, 1), (2, 2), (4, 1), (1, 4)]
SHAPE = BatchShape(LENGTH, BATCH, micro_batch=1, seed=7)


def text(samples: int, first: int) -> TokenShards:
    """Return tokens that count from `first` on, in two shards, with a tail too short for a sample."""
    return TokenShards(np.split(first + np.arange(samples * LENGTH + 3, dtype=np.uint32), [samples * LENGTH // 3]))


TEXTS = {name: text(samples, 10_000 * number) for number, (name, samples) in enumerate(SAMPLES.items())}


def loader(replica: int = 0, replicas: int = 1, shard_rank: int = 0, shard: int = 1, **changes) -> MixtureLoader:
    texts = changes.pop("texts", TEXTS)
    weights = [WEIGHTS[name] for name in texts]
    shape = replace(SHAPE, replica=replica, replicas=replicas, shard_rank=shard_rank, shards=shard, **changes)
    return MixtureLoader(texts, weights, shape)


def read(one: Loader, steps: int) -> list[tuple[str, int]]:
    """Return what a rank reads, in order, as (text, sample of the text)."""
    found = []
    for _ in range(steps):
        rows = torch.cat(one.next())
        assert torch.equal(rows, rows[:, :1] + torch.arange(LENGTH + 1)), "a row has tokens of one text only"
        found += [("abc"[int(first) // 10_000], int(first) % 10_000 // LENGTH) for first in rows[:, 0]]
    return found


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((1,), [1000]),
        ((3, 1), [750, 250]),
        ((1, 1, 1), [334, 333, 333]),
        ((0.7, 0.2, 0.1), [700, 200, 100]),
        ((2, 1e-3), [1000, 0]),
        ((999, 1.2), [999, 1]),
        ((5, 3, 2, 1), [454, 273, 182, 91]),
    ],
)
def test_shares_are_those_of_the_weights_to_one_sequence(weights: tuple[float, ...], shares: list[int]) -> None:
    found = shares_of(weights)
    assert sum(found) == BLOCK and all(
        abs(share - w * BLOCK / sum(weights)) < 1 for share, w in zip(found, weights, strict=True)
    )
    assert found == shares


def test_every_block_has_the_exact_shares_in_an_order_of_its_own() -> None:
    order = loader().order
    blocks = [[order.locate(entry)[0] for entry in range(first, first + BLOCK)] for first in (0, BLOCK, 41 * BLOCK)]
    assert [Counter(block) for block in blocks] == [Counter({0: 700, 1: 250, 2: 50})] * 3
    assert blocks[0] != blocks[1] != blocks[2] and blocks[0] != sorted(blocks[0])
    other = loader(seed=8).order
    assert [other.locate(entry)[0] for entry in range(BLOCK)] != blocks[0]


def test_each_text_is_read_in_its_own_order_with_its_own_epochs() -> None:
    own = {name: [] for name in SAMPLES}
    for name, sample in read(loader(), 3 * BLOCK // BATCH):
        own[name].append(sample)
    for name, samples in own.items():
        alone = SampleOrder(SAMPLES[name], 7)
        assert samples == [alone.sample(entry) for entry in range(len(samples))]
    assert sorted(own["c"][:11]) == list(range(11)) and own["c"][:11] != own["c"][11:22]


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
def test_the_order_is_the_same_on_every_mesh_and_after_a_resume(replicas: int, shard: int) -> None:
    expected = read(loader(), 160)
    ranks = [loader(r, replicas, s, shard) for r in range(replicas) for s in range(shard)]
    found = [pair for _ in range(60) for rank in ranks for pair in read(rank, 1)]
    states = [json.loads(json.dumps(rank.state_dict())) for rank in ranks]
    assert states == [{"position": 60 * BATCH}] * len(ranks)
    ranks = [loader(r, replicas, s, shard) for r in range(replicas) for s in range(shard)]
    for rank, state in zip(ranks, states, strict=True):
        rank.load_state_dict(state)
    found += [pair for _ in range(100) for rank in ranks for pair in read(rank, 1)]
    assert found == expected
    assert Counter(name for name, _ in found[:BLOCK]) == {"a": 700, "b": 250, "c": 50}


def test_a_mixture_of_one_text_is_that_text() -> None:
    assert read(loader(texts={"a": TEXTS["a"]}), 300) == read(Loader(TEXTS["a"], SHAPE), 300)


@pytest.mark.parametrize("steps", [(3, 3), (40, 17), (0, 130)])
def test_what_was_read_is_counted_by_text_however_far_each_replica_was(steps: tuple[int, int]) -> None:
    replicas = [loader(0, 2), loader(1, 2)]
    found = Counter(name for one, count in zip(replicas, steps, strict=True) for name, _ in read(one, count))
    states = [one.state_dict() for one in replicas]
    counted = replicas[0].read_by_text(states)
    assert counted == {name: found[name] for name in SAMPLES} and sum(counted.values()) == sum(steps) * BATCH // 2
    following = loader()
    following.load_state_dict(merge_cursors(states, BATCH))
    behind = abs(steps[0] - steps[1]) * BATCH // 2
    if behind:
        found.update(name for name, _ in read(following, -(-behind // BATCH)))
        exact = max(steps) * BATCH + -behind % BATCH
        assert found == Counter("abc"[following.order.locate(entry)[0]] for entry in range(exact))


def test_a_longer_run_reads_what_was_added_to_a_text_after_what_was_there() -> None:
    larger = TEXTS | {"b": text(60, 10_000)}
    first = loader()
    before = read(first, 10)
    state = first.state_dict()
    longer = loader(texts=larger)
    state = longer.state_for_length(state, lambda name, samples, of_text: SAMPLES[name])
    assert state == {"position": 10 * BATCH, "sizes": [[90], [40, 60], [11]]}
    longer.load_state_dict(state)
    assert longer.state_dict() == state
    own = [sample for name, sample in before + read(longer, 40) if name == "b"]
    assert sorted(own[:40]) == list(range(40)) and sorted(own[40:60]) == list(range(40, 60))
    assert loader().state_for_length({"position": 8}, lambda name, samples, of_text: samples) == {"position": 8}
    bounds = []
    loader().state_for_length(
        {"position": 8}, lambda name, samples, of_text: bounds.append((name, of_text(1001))) or samples
    )
    assert bounds == [("a", 1001), ("b", 500), ("c", 100)]


@pytest.mark.parametrize("entries", [0, 1, 999, 1000, 1001, 2500])
def test_a_hub_text_is_prepared_as_far_as_the_mixture_reads_it(entries: int) -> None:
    order = loader().order
    counts = order.count(range(entries))
    assert counts.sum() == entries
    for share, count in zip(order.shares, counts, strict=True):
        assert count <= max_entries_of(share, entries) <= count + share


def test_old_blocks_and_epochs_are_forgotten() -> None:
    one = loader()
    read(one, 5 * BLOCK // BATCH)
    assert len(one.order._blocks) <= 2 and all(len(order._parts) <= 2 for order in one.order.orders[:2])


def test_samples_are_found_in_their_texts() -> None:
    mixed = MixedShards(list(TEXTS.values()), LENGTH)
    assert len(mixed) == sum(SAMPLES.values()) * LENGTH + 1
    assert [int(mixed.window(number * LENGTH, LENGTH + 1)[0]) for number in (0, 89, 90, 129, 130, 140)] == [
        *(0, 89 * LENGTH, 10_000, 10_000 + 39 * LENGTH, 20_000, 20_000 + 10 * LENGTH)
    ]


def test_a_text_without_a_sequence_is_refused_by_its_name() -> None:
    with pytest.raises(DataError, match="training data: 4 tokens of c, 5 needed for one sequence of 4"):
        loader(texts=TEXTS | {"c": TokenShards([np.arange(4, dtype=np.uint16)])})
    few = {name: TokenShards([np.arange(5, dtype=np.uint16)]) for name in "abc"}
    with pytest.raises(DataError, match="one step of 8 sequences of 4 needs 33"):
        loader(texts=few)


def test_a_mixture_has_no_state_of_its_own() -> None:
    far = MixtureOrder([SampleOrder(number, 7) for number in SAMPLES.values()], list(WEIGHTS.values()), 7)
    near = loader().order
    assert [far.sample(entry) for entry in (10**9, 10**9 + 1)] == [near.sample(entry) for entry in (10**9, 10**9 + 1)]


def test_a_disk_that_does_not_answer_is_told() -> None:
    with pytest.raises(TrainingError, match="does not answer"):
        PrefetchLoader(loader(), timeout_seconds=0.01)._receive()  # no batch was requested, so none arrives


def test_counting_sequences_does_not_disturb_the_thread_that_reads_ahead() -> None:
    """The summary counts while the thread may forget the blocks before its position."""
    order = MixtureOrder([SampleOrder(number, 7) for number in SAMPLES.values()], list(WEIGHTS.values()), 7)
    order.sample(0)

    class Before(int):
        """Entry before which blocks are forgotten. Each comparison with a block counts sequences, as another thread may."""

        def __floordiv__(self, other: int) -> Before:
            return Before(int(self) // other)

        def __le__(self, block: int) -> bool:
            assert order.count(range(BLOCK * 2, BLOCK * 2 + 9)).sum() == 9
            return int(self) <= block

    order.forget(Before(BLOCK))
