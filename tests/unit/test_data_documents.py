"""Tests of documents without packing: every token is predicted once, the order is equal on every mesh, there is
little padding, and a run can resume at any step."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from llmtrain.data import documents
from llmtrain.data.batch_shape import BatchShape
from llmtrain.data.dataset import INDEX, Index, Shard, ShardWriter, SplitIndex, TokenDataset, TokenShards
from llmtrain.data.document_loader import (
    WINDOW_BATCHES,
    BucketedOrder,
    DocumentLoader,
    document_eval_batches,
    padded,
)
from llmtrain.data.documents import DocumentSamples, document_samples, find_starts
from llmtrain.data.order import SampleOrder, resize
from llmtrain.data.sources import Position
from llmtrain.errors import DataError
from llmtrain.loss import IGNORE_INDEX, inputs_and_labels
from llmtrain.reshard import MeshChange

EOS, LENGTH, BATCH = 0, 16, 8
MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]


def text(lengths: list[int]) -> np.ndarray:
    """Return tokens of documents of these lengths, eos included. All other tokens equal their positions, counted from 1."""
    ids = np.arange(1, sum(lengths) + 1, dtype=np.uint32)
    ids[np.cumsum(lengths) - 1] = EOS
    return ids


def samples_of(ids: np.ndarray, length: int = LENGTH, limit: int | None = None) -> DocumentSamples:
    whole = TokenShards(np.split(ids, [len(ids) // 3]))
    limited = TokenShards(np.split(ids, [len(ids) // 3]), limit)
    return DocumentSamples(limited, find_starts(whole, EOS, length), EOS)


def drawn(count: int, seed: int = 0) -> DocumentSamples:
    """Return samples of documents of many lengths, some of them longer than a sequence."""
    return samples_of(text(np.random.default_rng(seed).integers(1, 2 * LENGTH, count).tolist()))


@pytest.mark.parametrize("scanned", [1, 5, 1 << 24])
def test_samples_tile_the_tokens_document_by_document(monkeypatch: pytest.MonkeyPatch, scanned: int) -> None:
    monkeypatch.setattr(documents, "SCANNED_TOKENS", scanned)
    ids = np.concatenate([text([3, 1, 1, 9, 4, 5]), [7, 8, 9]])  # the last document has no eos
    samples = samples_of(ids, length=4)
    assert all(samples.read(sample).flags.owndata for sample in range(len(samples))), "a view keeps a file open"
    rows = [samples.read(sample).tolist() for sample in range(len(samples))]
    assert [len(row) - 1 for row in rows] == samples.lengths(np.arange(len(samples))).tolist()
    assert [len(row) - 1 for row in rows] == [3, 1, 1, 4, 4, 1, 4, 4, 1, 3]
    assert list(itertools.chain.from_iterable(row[1:] for row in rows)) == ids.tolist()
    assert [row[0] for row in rows] == [EOS, EOS, EOS, EOS, ids[8], ids[12], EOS, EOS, ids[21], EOS]
    assert samples.attended_length() == pytest.approx(sum((len(row) - 1) ** 2 for row in rows) / len(ids))


@pytest.mark.parametrize(
    ("limit", "end"), [(0, 0), (1, 1), (3, 3), (4, 4), (12, 9), (13, 13), (19, 18), (25, 23), (26, 26)]
)
def test_the_last_sample_is_left_out_if_a_limit_cuts_it(limit: int, end: int) -> None:
    """The first sample is kept even if the limit cuts it."""
    ids = text([3, 1, 1, 9, 4, 5, 3])
    samples = samples_of(ids, 4, limit)
    rows = [samples.read(sample).tolist()[1:] for sample in range(len(samples))]
    assert list(itertools.chain.from_iterable(rows)) == ids[:end].tolist() and all(rows)
    ends = np.cumsum([len(row) for row in rows])
    assert samples.lengths(np.arange(len(samples))).tolist() == [len(row) for row in rows]
    for tokens in range(30):
        assert samples.count_within(tokens) == (ends <= tokens).sum()


def rank(samples: DocumentSamples, r: int = 0, replicas: int = 1, s: int = 0, shard: int = 1, micro_batch: int = 1):
    shape = BatchShape(LENGTH, BATCH, micro_batch, seed=7, replica=r, replicas=replicas, shard_rank=s, shards=shard)
    return DocumentLoader(samples, shape)


def documents_in(batch: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the tokens that each row predicts. Check that padding is at the end of rows only."""
    assert batch.dtype == torch.int64
    found = []
    for row in batch.tolist():
        size = row.index(IGNORE_INDEX) if IGNORE_INDEX in row else len(row)
        assert set(row[size:]) <= {IGNORE_INDEX}
        found.append(tuple(row[1:size]))
    return found


def steps(samples: DocumentSamples, replicas: int, shard: int, count: int, micro_batch: int = 1) -> list[list]:
    """Return the documents of each step in rank order."""
    ranks = [rank(samples, r, replicas, s, shard, micro_batch) for r in range(replicas) for s in range(shard)]
    taken = []
    for _ in range(count):
        micro_batches = [one.next() for one in ranks]
        rows = [row for batches in micro_batches for batch in batches for row in documents_in(batch)]
        assert {one.mean_replica_tokens for one in ranks} == {sum(map(len, rows)) / replicas}
        taken.append(rows)
    return taken


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_every_document_once_an_epoch_and_one_order_for_every_mesh(micro_batch: int) -> None:
    samples = drawn(420)
    count = 3 * len(samples) // BATCH
    expected = steps(samples, 1, 1, count, micro_batch)
    for replicas, shard in MESHES:
        assert steps(samples, replicas, shard, count, micro_batch) == expected
    endless = list(itertools.chain.from_iterable(expected))
    every = sorted(tuple(samples.read(sample)[1:].tolist()) for sample in range(len(samples)))
    epochs = [endless[first : first + len(every)] for first in (0, len(every))]
    assert all(sorted(epoch) == every for epoch in epochs) and epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0], key=len)


def test_a_micro_batch_has_documents_of_similar_length_and_a_step_has_not() -> None:
    samples, micro_batch = drawn(3000), 4
    loader = rank(samples, micro_batch=micro_batch)
    batches = [loader.next() for _ in range(2 * WINDOW_BATCHES)]
    spread = [max(map(len, rows)) - min(map(len, rows)) for step in batches for rows in map(documents_in, step)]
    assert np.mean(spread) < 1
    per_step = [[batch.shape[1] for batch in step] for step in batches]
    assert np.mean([max(lengths) - min(lengths) for lengths in per_step]) > 2


def test_replicas_have_unequal_work_in_a_step_and_equal_work_in_the_long_run() -> None:
    """Wait-avoiding methods are made for such a load. Work is the number of positions that a replica computes."""
    samples = drawn(6000)
    ranks = [rank(samples, replica, 2, micro_batch=4) for replica in range(2)]
    work = np.array([[sum(batch.numel() for batch in one.next()) for one in ranks] for _ in range(300)])
    assert np.mean(work.max(axis=1) / work.min(axis=1)) > 1.2
    assert abs(np.diff(work.mean(axis=0))[0]) < 0.05 * work.mean()


def test_the_window_at_an_epochs_end_is_shorter_and_its_last_batch_is_not_sorted() -> None:
    count = (WINDOW_BATCHES + 2) * BATCH + 3
    shuffled = SampleOrder(count, 7)
    order = BucketedOrder(shuffled, lambda samples: samples, BATCH, 2, 7)
    entries = [order.sample(entry) for entry in range(2 * count)]
    mixed = range(count // BATCH * BATCH, (count // BATCH + 1) * BATCH)
    assert [entries[entry] for entry in mixed] == [shuffled.sample(entry) for entry in mixed]
    end = WINDOW_BATCHES * BATCH
    assert sorted(entries[:end]) == sorted(shuffled.sample(entry) for entry in range(end))
    pairs = [entries[first : first + 2] for first in range(0, end, 2)]
    assert sorted(pairs) == [list(pair) for pair in zip(*[iter(sorted(entries[:end]))] * 2, strict=True)]
    assert sorted(entries[:count]) == sorted(entries[count:]) == list(range(count))


@pytest.mark.parametrize("before", [0, 1, 5, 40])
def test_resume_at_any_step_with_another_micro_batch(before: int) -> None:
    samples = drawn(300)
    first = rank(samples, 1, 2, micro_batch=2)
    for _ in range(before):
        first.next()
    state = json.loads(json.dumps(first.state_dict()))
    assert state == {"position": before * BATCH, "sizes": [len(samples)], "unit": 2}
    same, other = (rank(samples, 1, 2, micro_batch=size) for size in (2, 4))
    other.next()
    for second in (same, other):
        second.load_state_dict(state)
    for _ in range(60):
        expected, got, regrouped = first.next(), same.next(), other.next()
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
        assert [*itertools.chain(*map(documents_in, regrouped))] == [*itertools.chain(*map(documents_in, expected))]
        assert first.mean_replica_tokens == same.mean_replica_tokens == other.mean_replica_tokens


def test_after_a_change_of_replicas_the_documents_that_none_has_read_come_first() -> None:
    samples = drawn(200)
    ranks, seen = [rank(samples, replica, 2) for replica in range(2)], Counter()
    for one, count in zip(ranks, (9, 4), strict=True):
        for _ in range(count):
            seen.update(row for batch in one.next() for row in documents_in(batch))
    change = MeshChange(old_replicas=2, old_shards=1, replicas=4, shards=1, replica=0, shard=0, global_step=6)
    state = ranks[0].reshard_rule().combine(change, [one.state_dict() for one in ranks])
    assert state["left"] and state["unit"] == 1
    four = [rank(samples, replica, 4) for replica in range(4)]
    for one in four:
        one.load_state_dict(state)
    for _ in range((len(samples) - sum(seen.values())) // BATCH):
        seen.update(row for one in four for batch in one.next() for row in documents_in(batch))
    every = Counter(tuple(samples.read(sample)[1:].tolist()) for sample in range(len(samples)))
    assert not seen - every and (every - seen).total() < BATCH


def test_a_longer_run_reads_what_is_left_and_then_what_was_added() -> None:
    ids = text(np.random.default_rng(3).integers(2, 9, 700).tolist())
    few = samples_of(ids, limit=int(np.flatnonzero(ids == EOS)[299]) + 2)
    all_of_them = samples_of(ids)
    assert (len(few), len(all_of_them)) == (300, 700)
    short, read = rank(few), []
    for _ in range(20):
        read += [row for batch in short.next() for row in documents_in(batch)]
    longer = rank(all_of_them)
    longer.load_state_dict(resize(short.state_dict(), 0, 700))
    for _ in range(67):
        read += [row for batch in longer.next() for row in documents_in(batch)]
    every = [tuple(all_of_them.read(sample)[1:].tolist()) for sample in range(700)]
    old, new = set(every[:300]), set(every[300:])
    assert len(set(read)) == len(read) == 696
    assert set(read[:300]) == old and set(read[300:]) < new
    again = rank(all_of_them)
    again.load_state_dict(longer.state_dict())
    assert again.state_dict() == longer.state_dict() and again.order.sizes == [300, 700]


def test_another_text_under_a_checkpoint_is_refused() -> None:
    loader = rank(drawn(100))
    with pytest.raises(DataError, match=r"training data: \d+ documents, but 41 when the run's checkpoint was written"):
        loader.load_state_dict({"position": 8, "sizes": [41], "unit": 1})


def test_too_few_documents_are_refused_with_both_numbers() -> None:
    rank(samples_of(text([3] * BATCH)))
    with pytest.raises(DataError, match=r"training data: 7 documents of at most 16 tokens, but one step needs 8;"):
        rank(samples_of(text([3] * (BATCH - 1))))


@pytest.mark.parametrize(("longest", "length"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 20), (20, 20)])
def test_padded_lengths_are_multiples_of_eight_or_the_longest_possible(longest: int, length: int) -> None:
    batch = padded([np.arange(1, longest + 2), np.array([5, 6])], rows=3, sequence_length=20)
    assert batch.shape == (3, length + 1)
    inputs, labels = inputs_and_labels(batch)
    assert (labels != IGNORE_INDEX).sum(1).tolist() == [longest, 1, 0]
    assert inputs.min() == 0 and inputs[1].tolist() == [5, 6, *[0] * (length - 2)]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 100, 10**6])
def test_validation_is_of_the_first_documents_each_on_one_rank(world: int, max_tokens: int) -> None:
    samples = drawn(50)
    shape = {"max_tokens": max_tokens, "sequence_length": LENGTH, "micro_batch": 3, "world": world}
    ranks = [list(document_eval_batches(samples, rank=number, **shape)) for number in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    found = []
    for inputs, labels in itertools.chain.from_iterable(ranks):
        assert inputs.shape == labels.shape and inputs.min() >= 0
        found += [tuple(row[row != IGNORE_INDEX].tolist()) for row in labels if (row != IGNORE_INDEX).any()]
    count = len(found)
    assert sorted(found) == sorted(tuple(samples.read(sample)[1:].tolist()) for sample in range(count))
    ends = np.cumsum(samples.lengths(np.arange(len(samples))))
    assert count == max(1, int((ends <= max_tokens).sum()))
    with pytest.raises(DataError, match="validation data: no documents"):
        document_eval_batches(samples_of(text([3]), limit=0), rank=0, **shape)


# -- the file with the starts of samples ----------------------------------------------------------------------------


def prepared(folder: Path, ids: np.ndarray, limit: int | None = None) -> TokenDataset:
    """Write a folder of token shards as `prepare` leaves it, and return its dataset."""
    folder.mkdir(exist_ok=True)
    empty = SplitIndex(tokens=0, documents=0, text_bytes=0, exhausted=True, position=Position(), shards=())
    writer = ShardWriter(folder, "train", np.dtype("<u4"))
    writer.append(ids)
    writer.close()
    shards: tuple[Shard, ...] = tuple(writer.shards)
    train = empty.model_copy(update={"tokens": len(ids), "documents": int((ids == EOS).sum()), "shards": shards})
    index = Index(
        format=2,
        source="x",
        tokenizer="y",
        vocab_size=9,
        eos_id=EOS,
        dtype="<u4",
        splits={"train": train, "validation": empty},
    )
    (folder / INDEX).write_text(index.model_dump_json())
    return TokenDataset(folder, index, {} if limit is None else {"train": limit})


def test_starts_are_found_once_and_read_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, searches = text([3, 1, 9, 4, 5]), []
    dataset = prepared(tmp_path, ids)
    search = documents.find_starts
    monkeypatch.setattr(documents, "find_starts", lambda *given: searches.append(given) or search(*given))
    file = tmp_path / "train-samples-4.npy"
    assert len(document_samples(dataset, "train", 4, write=False)) == 8 and not file.exists()
    first = document_samples(dataset, "train", 4)
    assert file.exists() and len(searches) == 2
    again = document_samples(dataset, "train", 4)
    assert len(searches) == 2 and [again.read(i).tolist() for i in range(8)] == [
        first.read(i).tolist() for i in range(8)
    ]
    limited = TokenDataset(tmp_path, dataset.index, {"train": 13})
    assert len(document_samples(limited, "train", 4)) == 5 and len(searches) == 2
    grown = prepared(tmp_path, np.concatenate([ids, text([2])]))
    assert len(document_samples(grown, "train", 4)) == 9 and len(searches) == 3
    assert len(document_samples(grown, "train", 5)) == 7 and len(searches) == 4


def changed(file: Path, position: int, value: int) -> None:
    starts = np.load(file)
    starts[position] = value
    np.save(file, starts)


DAMAGES = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-8]),
    "empty": lambda file: file.write_bytes(b""),
    "text": lambda file: file.write_text("x" * 500),
    "other numbers": lambda file: np.save(file, np.load(file).astype(np.int32)),
    "two axes": lambda file: np.save(file, np.load(file)[:, None]),
    "another beginning": lambda file: changed(file, 0, 1),
    "another end": lambda file: changed(file, -1, 23),
    "too long a sample": lambda file: changed(file, 3, 9),
    "a document's middle": lambda file: changed(file, 1, 2),
}


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_a_damaged_file_is_found_anew(tmp_path: Path, damage: str) -> None:
    dataset, file = prepared(tmp_path, text([3, 1, 9, 4, 5])), tmp_path / "train-samples-4.npy"
    document_samples(dataset, "train", 4)
    sound = np.load(file)
    DAMAGES[damage](file)
    document_samples(dataset, "train", 4)
    assert np.array_equal(np.load(file), sound)


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, text([3, 1, 9, 4, 5]))
    (tmp_path / "train-samples-4.lock").mkdir()  # root may write everywhere
    assert len(document_samples(dataset, "train", 4)) == 8
    assert not (tmp_path / "train-samples-4.npy").exists()


def test_tokens_without_ends_of_documents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="no train document ends, because the eos token 0 does not occur in its 9 tokens"
    ):
        document_samples(prepared(tmp_path, np.arange(1, 10, dtype=np.uint32)), "train", 4)
