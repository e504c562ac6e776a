"""Tests of the loader: every sample once per epoch, one global order on every mesh, resuming by position, and fixed
validation windows."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from llmtrain.data.batch_shape import BatchShape
from llmtrain.data.dataset import TokenShards
from llmtrain.data.loader import Loader, PrefetchLoader, eval_batches
from llmtrain.data.order import merge_cursors, resize
from llmtrain.errors import DataError, TrainingError
from llmtrain.loss import IGNORE_INDEX
from llmtrain.reshard import MeshChange
from tests.end_to_end.runs import wait_until
from tests.mother import session
from tests.unit import processes

LENGTH, BATCH = 4, 8
MESHES = [(1, 1), (2, 2), (4, 1), (1, 4)]


def sequence(samples: int) -> TokenShards:
    """Return tokens that equal their positions, in two shards, with a tail too short for a window."""
    return TokenShards(np.split(np.arange(samples * LENGTH + 3, dtype=np.uint32), [samples * LENGTH // 3]))


def loader(tokens: TokenShards, replica: int = 0, replicas: int = 1, shard_rank: int = 0, shard: int = 1, **keys: int):
    shape = BatchShape(LENGTH, BATCH, 1, 7, replica, replicas, shard_rank, shard)
    return Loader(tokens, replace(shape, **keys))


def steps(tokens: TokenShards, replicas: int, shard: int, count: int, micro_batch: int = 1) -> list[list[int]]:
    """Return the samples of each step in rank order."""
    ranks = [
        loader(tokens, r, replicas, s, shard, micro_batch=micro_batch) for r in range(replicas) for s in range(shard)
    ]
    taken = []
    for _ in range(count):
        rows = torch.cat([batch for rank in ranks for batch in rank.next()])
        assert rows.dtype == torch.int64 and rows.shape == (BATCH, LENGTH + 1)
        assert torch.equal(rows, rows[:, :1] + torch.arange(LENGTH + 1))
        taken.append((rows[:, 0] // LENGTH).tolist())
    return taken


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
def test_every_sample_once_an_epoch(replicas: int, shard: int) -> None:
    taken = list(itertools.chain(*steps(sequence(24), replicas, shard, 9)))
    epochs = [taken[i : i + 24] for i in (0, 24, 48)]
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(24))


@pytest.mark.parametrize("samples", [24, 29])
def test_global_order_depends_on_the_seed_alone(samples: int) -> None:
    tokens = sequence(samples)
    expected = steps(tokens, 1, 1, 12)
    for replicas, shard in MESHES:
        for micro_batch in (1, 2):
            assert steps(tokens, replicas, shard, 12, micro_batch) == expected
    endless = list(itertools.chain(*expected))
    assert sorted(endless[samples : 2 * samples]) == list(range(samples))
    assert endless[:samples] == np.random.default_rng([7, 0]).permutation(samples).tolist()


def test_micro_batches_cut_a_rank_s_part_in_order() -> None:
    micro = loader(sequence(24), 1, 2, micro_batch=2).next()
    assert [batch.shape for batch in micro] == [(2, LENGTH + 1)] * 2
    assert torch.equal(torch.cat(micro), torch.cat(loader(sequence(24), 1, 2, micro_batch=4).next()))


@pytest.mark.parametrize("before", [0, 1, 3, 5])
def test_resume_by_position(before: int) -> None:
    first = loader(sequence(29), 1, 2)
    for _ in range(before):
        first.next()
    assert first.state_dict() == {"position": before * BATCH}
    assert first.cursor.num_read == before * BATCH
    second = loader(sequence(29), 1, 2)
    second.next()
    second.load_state_dict(first.state_dict())
    for _ in range(8):
        assert all(torch.equal(a, b) for a, b in zip(first.next(), second.next(), strict=True))


def test_seeds_differ_and_a_window_s_last_token_is_the_next_one_s_first() -> None:
    tokens = sequence(24)
    assert not torch.equal(torch.cat(loader(tokens).next()), torch.cat(loader(tokens, seed=8).next()))
    assert loader(tokens).num_samples == 24
    exact = TokenShards([np.arange(24 * LENGTH, dtype=np.uint16)])
    assert loader(exact).num_samples == 23


def test_too_little_text_is_refused_with_both_numbers() -> None:
    loader(sequence(BATCH))
    with pytest.raises(DataError, match="training data: 31 tokens, but one step of 8 sequences of 4 needs 33"):
        loader(sequence(BATCH - 1))


def evaluate(tokens: TokenShards, world: int, max_tokens: int, micro_batch: int = 2):
    keys = {"max_tokens": max_tokens, "sequence_length": LENGTH, "micro_batch": micro_batch, "world": world}
    return [list(eval_batches(tokens, rank=rank, **keys)) for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(("max_tokens", "windows"), [(1, 1), (4, 1), (27, 6), (28, 7), (10**6, 11)])
def test_validation_windows_are_dealt_once_in_equal_numbers(world: int, max_tokens: int, windows: int) -> None:
    ranks = evaluate(sequence(11), world, max_tokens)
    assert len({len(batches) for batches in ranks}) == 1
    seen = []
    for inputs, labels in (batch for batches in ranks for batch in batches):
        assert inputs.shape == labels.shape == (2, LENGTH) and inputs.dtype == labels.dtype == torch.int64
        real = (labels != IGNORE_INDEX).all(dim=1)
        assert (labels[~real] == IGNORE_INDEX).all()
        assert torch.equal(labels[real], inputs[real] + 1)
        seen += (inputs[real][:, 0] // LENGTH).tolist()
    assert sorted(seen) == list(range(windows))


def test_too_little_validation_text_is_refused_at_once() -> None:
    with pytest.raises(DataError, match="validation data: 4 tokens, but one sequence needs 5"):
        keys = {"max_tokens": 100, "sequence_length": LENGTH, "micro_batch": 1, "rank": 0, "world": 1}
        eval_batches(TokenShards([np.arange(4, dtype=np.uint16)]), **keys)


def test_reading_ahead_changes_neither_batches_nor_state() -> None:
    plain, ahead = loader(sequence(29), 1, 2), PrefetchLoader(loader(sequence(29), 1, 2), timeout_seconds=10)
    states = []
    for _ in range(5):
        states.append(ahead.state_dict())
        assert ahead.state_dict() == plain.state_dict()
        assert torch.equal(torch.cat(ahead.next()), torch.cat(plain.next()))
    wait_until(lambda: ahead.loader.state_dict() != ahead.state_dict(), "the sixth step is not read")
    ahead.load_state_dict(states[2])
    plain.load_state_dict(states[2])
    for _ in range(3):
        assert ahead.state_dict() == plain.state_dict()
        assert torch.equal(torch.cat(ahead.next()), torch.cat(plain.next()))


def test_a_disk_that_does_not_answer_is_an_error() -> None:
    answers = threading.Event()
    slow = loader(sequence(29))
    read, slow.next = slow.next, lambda: answers.wait(20) and read()
    ahead = PrefetchLoader(slow, timeout_seconds=0.05)
    with pytest.raises(TrainingError, match="does not answer"):
        ahead.next()
    answers.set()


def test_a_process_ends_though_its_disk_never_answers() -> None:
    process = session().fork(processes.read_from_a_silent_disk, capture=True)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "does not answer" in output


def test_a_process_that_ends_while_a_batch_is_read_does_not_crash() -> None:
    """The interpreter aborts if it ends while a thread is busy with tensors."""
    for _ in range(2):
        process = session().fork(processes.end_while_a_batch_is_read, capture=True)
        assert process.communicate(timeout=60) == ("", None) and process.returncode == 0


def test_an_error_of_the_thread_is_raised_by_next() -> None:
    broken = loader(sequence(29))

    def fail() -> None:
        raise DataError("a shard is gone")

    broken.next = fail
    with pytest.raises(DataError, match="a shard is gone"):
        PrefetchLoader(broken, timeout_seconds=10).next()


@pytest.mark.parametrize("replicas", [(2, 2, 2), (1, 2, 4), (4, 2, 1)])
def test_another_batch_reads_on_where_the_replicas_stopped(replicas: tuple[int, ...]) -> None:
    """Replicas stop after different numbers of steps, and the batch is doubled whenever the run continues."""
    tokens, batch, seen = sequence(800), BATCH, Counter()
    ranks = [loader(tokens, number, replicas[0]) for number in range(replicas[0])]
    for count in replicas:
        states = [rank.state_dict() for rank in ranks]
        changes = [MeshChange(len(ranks), 1, count, 1, number, 0, 0, batch) for number in range(count)]
        batch *= 2
        ranks = [loader(tokens, number, count, global_batch=batch) for number in range(count)]
        for rank, change in zip(ranks, changes, strict=True):
            rank.load_state_dict(
                change.apply({"loader": rank.reshard_rule()}, [{"loader": one} for one in states])["loader"]
            )
        for number, rank in enumerate(ranks):
            seen.update(int(row[0]) // LENGTH for _ in range(2 + number) for part in rank.next() for row in part)
    state = merge_cursors([rank.state_dict() for rank in ranks], batch)
    lowest = min([state["position"], *(start for start, _ in state.get("left", []))])
    assert set(seen.values()) == {1} and {ranks[0].order.sample(entry) for entry in range(lowest)} <= seen.keys()


@pytest.mark.parametrize("done", [2, 3])
def test_samples_that_are_added_come_after_those_that_were_there(done: int) -> None:
    """A hub dataset is tokenized as far as a run reads it; a longer run adds to it."""
    small, large, larger = (sequence(samples) for samples in (24, 40, 56))
    first, second, third = loader(small), loader(large), loader(larger)
    before = [first.order.sample(entry) for entry in range(24)]
    for _ in range(done):
        first.next()
    second.load_state_dict(resize(first.state_dict(), 24, 40))
    once = [second.order.sample(entry) for entry in range(40)]
    assert once[:24] == before and sorted(once[24:]) == list(range(24, 40)) != once[24:]
    following = [second.order.sample(entry) for entry in range(40, 80)]
    assert sorted(following) == list(range(40)), "the next epoch has all samples"
    assert set(following[:24]) != set(range(24)), "the next epoch mixes old and new samples"
    assert second.cursor.num_read == done * BATCH
    state = second.state_dict()
    assert state == {"position": done * BATCH, "sizes": [24, 40]}
    again = loader(large)
    again.load_state_dict(resize(state, 24, 40))
    assert [again.order.sample(entry) for entry in range(80)] == [second.order.sample(entry) for entry in range(80)]
    third.load_state_dict(resize(state, 24, 56))
    assert [third.order.sample(entry) for entry in range(40)] == once and third.order.sizes == [24, 40, 56]
    assert merge_cursors([state, state], BATCH)["sizes"] == [24, 40]
    assert resize(state, 24, 30) == {"position": done * BATCH, "sizes": [24, 30]}
    assert resize(state, 24, 20) == {"position": done * BATCH} == resize(first.state_dict(), 24, 24)
