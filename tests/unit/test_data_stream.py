"""Tests of tokens that are read while a process adds to them: waits end, errors are reported, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch.distributed as dist

from llmtrain.config import DataSection
from llmtrain.data import dataset, host_blocks, order, stream
from llmtrain.data import extend as extending
from llmtrain.data.batch_shape import BatchShape
from llmtrain.data.dataset import TokenDataset, open_dataset
from llmtrain.data.host_blocks import HostBlocks, posted_blocks
from llmtrain.data.loader import Loader
from llmtrain.data.prepare import cache_path, prepare
from llmtrain.data.sources import TextStream
from llmtrain.data.stream import GrowingTokens, first_block, shuffles_in_blocks, write_status
from llmtrain.data.tokens import Tokens
from llmtrain.errors import DataError, UnavailableError
from tests.end_to_end.runs import wait_until
from tests.unit.test_data_damage import all_tokens, searched
from tests.unit.test_data_prepare import TEXTS

MANY = 10**9
FIRST = 600
"""Number of tokens in the first block."""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSection:
    monkeypatch.setattr(order, "FIRST_BLOCK", FIRST)
    monkeypatch.setattr(order, "LARGEST_BLOCK", 4 * FIRST)
    for module in ("prepare", "stream"):
        monkeypatch.setattr(f"llmtrain.data.{module}.FIRST_BLOCK", FIRST)
    monkeypatch.setattr(extending, "BATCH_CHARACTERS", 1000)
    monkeypatch.setattr(stream, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(stream, "QUIET_SECONDS", 0.0)  # the first look prints, however late the second one is
    (tmp_path / "stories.txt").write_text("\n~~~\n".join(TEXTS))
    keys = {"tokenizer": "train:320", "validation_fraction": 0.2, "cache_dir": str(tmp_path / "cache")}
    return DataSection(source=str(tmp_path / "stories.txt"), separator="\n~~~\n", shuffle="blocks", **keys)


@pytest.fixture
def expected(data: DataSection) -> list[int]:
    return all_tokens(prepare(data.model_copy(update={"cache_dir": data.cache_dir + "-undisturbed"}), MANY, MANY))


def begun(data: DataSection, limit: int | None = None) -> TokenDataset:
    return prepare(data.model_copy(update={"max_tokens": limit}), MANY, 100, first_block_only=True)


def growing(prepared: TokenDataset, timeout: float = 60.0, **options: object) -> GrowingTokens:
    return GrowingTokens(prepared, timeout, **options)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Provide a function that lets the tokenizing thread read a number of further documents."""
    may_read = threading.Semaphore(0)

    class Gated(TextStream):
        def __iter__(self) -> Iterator[tuple[str, str]]:
            for found in super().__iter__():
                assert may_read.acquire(timeout=60)
                yield found

    monkeypatch.setattr(extending, "TextStream", Gated)
    return may_read.release


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_which_texts_are_shuffled_in_blocks() -> None:
    hub, files = DataSection(source="hf:o/d"), DataSection()
    assert shuffles_in_blocks(hub) and not shuffles_in_blocks(files)
    assert not shuffles_in_blocks(hub.model_copy(update={"shuffle": "all"}))
    assert shuffles_in_blocks(files.model_copy(update={"shuffle": "blocks"}))


def test_a_run_begins_with_the_first_block_and_reads_the_others_as_they_are_completed(
    data: DataSection, expected: list[int], gate: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    gate(400)
    prepared = begun(data)
    assert FIRST < prepared.index.splits["train"].tokens < 2 * FIRST and not prepared.index.splits["train"].exhausted
    assert len(first_block(prepared).tokens("train")) == FIRST + 1
    left = 400
    while left:  # take back the documents that the first start did not read
        left -= 1
        if not gate.__self__.acquire(blocking=False):
            break
    reports: list[int] = []
    thread = in_thread(lambda: prepare(data, MANY, 100, on_progress=lambda tokens, skipped: reports.append(tokens)))
    tokens = growing(prepared)
    assert tokens.wait_for(FIRST + 1) == len(tokens) and not tokens.is_complete
    assert capsys.readouterr().err == ""
    found: list[int] = []
    reader = in_thread(lambda: found.append(tokens.wait_for(3 * FIRST + 1)))
    wait_until(lambda: tokens.is_waiting(60.0), "the reader does not wait")
    gate(100)
    reader.join(60)
    assert found == [len(tokens)] and 3 * FIRST < len(tokens) < len(expected), "a complete block is committed"
    assert reports and max(reports) >= len(tokens)
    assert tokens.window(0, len(tokens)).tolist() == expected[: len(tokens)]
    assert capsys.readouterr().err == f"waiting for the tokenizer of {data.source}: 0.0 M of 0.0 M tokens\n"
    gate(400)
    assert tokens.wait_for(MANY) == len(expected) and tokens.is_complete
    assert tokens.window(0, len(tokens)).tolist() == expected
    thread.join(60)


def test_only_the_tokens_of_the_run_are_read(data: DataSection, expected: list[int]) -> None:
    prepared = begun(data, 2000)
    prepare(data, MANY, 100)
    tokens = growing(prepared)
    assert tokens.max_tokens == len(tokens) == tokens.wait_for(MANY) == 2000 and tokens.is_complete
    assert first_block(begun(data, 400)).limits["train"] == 400


def test_a_wait_without_progress_ends_and_one_with_progress_does_not(
    data: DataSection, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = begun(data)
    with pytest.raises(
        UnavailableError, match=r"no text was tokenized for 0\.05 s \(run\.timeout_seconds\) while 3,000 tokens were"
    ):
        growing(prepared, 0.05).wait_for(3000)
    assert capsys.readouterr().err.count("waiting for the tokenizer") == 1
    clock = iter(range(0, 1000, 30))
    monkeypatch.setattr(stream.time, "monotonic", lambda: float(next(clock)))  # each look takes 30 s
    tokens, looks = growing(prepared, 50.0), iter(range(1, 100))

    def progress() -> bool:
        write_status(prepared.directory, tokens=(look := next(looks)) * 10**6)
        return look > 10

    tokens.wait_until(progress, 10**8)
    lines = capsys.readouterr().err.splitlines()
    assert 3 <= len(lines) <= 6 and lines[-1].endswith(" M of 100.0 M tokens"), "one line per minute"
    assert lines[0] != lines[-1]


def test_errors_end_a_wait(data: DataSection) -> None:
    prepared = begun(data)
    write_status(prepared.directory, error="hf:o/d: no column data.text_key=text; it has body")
    with pytest.raises(DataError, match=r"^hf:o/d: no column data\.text_key=text; it has body$"):
        growing(prepared).wait_for(3000)
    write_status(prepared.directory, error="the hub does not answer", is_temporary=True)
    with pytest.raises(UnavailableError, match=r"^the hub does not answer$"):
        growing(prepared).wait_for(3000)
    (prepared.directory / stream.STATUS).write_text("half of")
    tokens = growing(prepared)
    tokens.closed.set()
    with pytest.raises(DataError, match="the run has ended while it waited for text"):
        tokens.wait_for(3000)
    tokens.closed.clear()
    prepare(data, MANY, 100)
    shard = prepared.directory / open_dataset(prepared.directory).index.splits["train"].shards[-1].name
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"train-\d+\.npy: \d+ bytes found, \d+ expected; delete"):
        tokens.wait_for(3000)
    (prepared.directory / "index.json").unlink()
    with pytest.raises(DataError, match=r"index\.json: no such file"):
        growing(prepared)


@pytest.mark.parametrize("is_temporary", [False, True])
def test_an_error_of_another_host_is_as_temporary_as_there(data: DataSection, is_temporary: bool) -> None:
    """All hosts raise the same kind of error. Otherwise only some of the launchers would restart."""
    store, tokens = dist.HashStore(), growing(begun(data))
    store.set("text/0", json.dumps({"committed": 600, "tokens": 700}))
    store.set("text/1", json.dumps({"error": "there: no hub", "is_temporary": is_temporary}))
    with pytest.raises(DataError, match="there: no hub") as caught:
        HostBlocks(store, [0, 1]).agree(tokens, 3000)
    assert isinstance(caught.value, UnavailableError) == is_temporary


@pytest.mark.parametrize("other", [0, FIRST, 3 * FIRST])
def test_hosts_compare_every_block_up_to_the_one_that_is_needed(data: DataSection, other: int) -> None:
    """A run that continues in a later epoch needs the last block first, but also reads the blocks before it."""
    store, tokens = dist.HashStore(), growing(prepare(data, MANY, 100))
    for host in (0, 1):
        for start in (0, FIRST, 3 * FIRST):
            digest = f"{host if start == other else 'same'}"
            store.set(f"text/{host}/{start}", json.dumps({"host": f"node{host}", "digest": digest}))
    blocks = HostBlocks(store, [0, 1])
    if other > 0:
        blocks.agree(tokens, FIRST + 1)
    with pytest.raises(DataError, match=rf"node1 has different tokens \(1\) than node0 \(0\) from token {other:,} on"):
        blocks.agree(tokens, 3 * FIRST + 2)


class CountedStore:
    """Store that counts its requests by name, and keeps what is set together."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.told: list[dict[str, Any]] = []
        self._store = dist.HashStore()

    def clone(self) -> CountedStore:
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.calls[name] += 1
        return getattr(self._store, name)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self.calls["multi_set"] += 1
        self.told.append(dict(zip(keys, map(json.loads, values), strict=True)))
        self._store.multi_set(keys, values)


@pytest.mark.parametrize("posted", [4, 3])
def test_a_waiting_rank_asks_for_the_progress_of_all_hosts_in_few_requests(posted: int) -> None:
    store = CountedStore()
    for host in range(posted):
        store._store.set(f"text/{host}", json.dumps({"committed": FIRST + host}))
    status = HostBlocks(store, range(4))._status()
    assert [one["committed"] for one in status["hosts"]] == [FIRST + host for host in range(posted)]
    assert store.calls == {"check": 1 if posted == 4 else 5, "multi_get": 1}


def test_a_run_that_continues_compares_and_posts_many_blocks_in_few_requests(
    data: DataSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request takes a round trip, and a long text has hundreds of blocks on each host."""
    size = 64
    for bound in ("FIRST_BLOCK", "LARGEST_BLOCK"):
        monkeypatch.setattr(order, bound, size)
    store, tokens = CountedStore(), growing(prepare(data, MANY, 100))
    blocks = -(-len(tokens) // size)
    assert 100 < blocks <= host_blocks.BLOCKS_PER_REQUEST
    for host in (0, 1):
        with posted_blocks(store, host, growing(begun(data))):
            store._store.wait([f"text/{host}/{size * (blocks - 1)}"])
    assert store.calls == {"multi_set": 2}
    store.calls.clear()
    HostBlocks(store, [0, 1]).agree(tokens, MANY)
    assert store.calls == {"check": 1, "multi_get": 1}
    assert not tokens.is_waiting(60.0), "a disk that hangs after a short comparison is not taken for a wait"

    monkeypatch.setattr(host_blocks, "BLOCKS_PER_REQUEST", 40)
    store = CountedStore()
    with posted_blocks(store, 0, growing(begun(data))):
        store._store.wait([f"text/0/{size * (blocks - 1)}"])
    posted = [told["text/0"]["posted"] for told in store.told]
    assert posted == [40 * size, 80 * size, *posted[2:]] and posted[-1] == blocks * size, "each request is progress"
    HostBlocks(store, [0]).agree(tokens, MANY)
    assert store.calls["check"] == store.calls["multi_get"] == -(-blocks // 40)
    assert tokens.is_waiting(60.0), "a long comparison is not taken for a disk that does not answer"


def test_the_error_of_a_thread_that_posts_is_as_temporary_as_the_error(
    data: DataSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (DataError("damaged"), UnavailableError("no hub"), OSError("no disk")):
        store, tokens = dist.HashStore(), growing(begun(data))
        monkeypatch.setattr(tokens, "refresh", Mock(side_effect=error))
        with posted_blocks(store, 0, tokens):
            posted = json.loads(store.get("text/0"))
        assert posted["is_temporary"] == (not isinstance(error, DataError) or isinstance(error, UnavailableError))
        assert posted["error"].endswith(str(error))


def test_an_index_that_can_not_be_read_now_is_a_temporary_error(
    data: DataSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If only the status of the file can't be read, the index is read anyway."""
    tokens, read = growing(begun(data)), Path.read_bytes
    (tokens.directory / dataset.INDEX).touch()

    def refuse(self: Path, **options: Any) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UnavailableError, match=r"can't be read \(.*Stale file handle.*start the same command again"):
        tokens.refresh()
    monkeypatch.setattr(Path, "read_bytes", read)
    monkeypatch.setattr(Path, "stat", refuse)
    tokens.refresh()


def test_few_shards_are_open_at_a_time(data: DataSection, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit holds for all texts of a process together, and within a batch."""
    monkeypatch.setattr(extending, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(dataset, "open_shard", lru_cache(2)(dataset.open_shard.__wrapped__))
    prepared = prepare(data, MANY, 100)
    assert len(prepared.index.splits["train"].shards) > 10
    opened = []

    class Counted(Tokens):
        def __len__(self) -> int:
            return len(expected)

        def window(self, start: int, length: int) -> np.ndarray:
            found = whole.window(start, length)
            opened.append(Path("/proc/self/maps").read_text().count(str(prepared.directory)))
            return found

    whole, tokens = prepared.tokens("train"), growing(prepared)
    assert str(prepared.directory) not in Path("/proc/self/maps").read_text(), "nothing is opened before it is read"
    assert tokens.window(0, len(expected)).tolist() == expected
    Loader(Counted(), BatchShape(sequence_length=8, global_batch=40, micro_batch=40, seed=1)).next()
    assert max(opened) == 2


def test_ctrl_c_within_a_commit_leaves_no_half_shard(
    data: DataSection, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    flush, interrupted = os.fsync, []

    def interrupt(handle: int) -> None:
        if not interrupted:
            interrupted.append(handle)
            os.kill(os.getpid(), signal.SIGINT)
        flush(handle)

    begun(data)
    monkeypatch.setattr(os, "fsync", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            prepare(data, MANY, 100)
    finally:
        signal.signal(signal.SIGINT, before)
    kept = open_dataset(cache_path(data))
    assert searched(kept) is None
    assert all_tokens(kept) == expected[: kept.index.splits["train"].tokens]
    assert all_tokens(prepare(data, MANY, 100)) == expected
