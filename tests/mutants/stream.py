"""Mistakes in training beside tokenizing."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BLOCKS = ("tests/unit/test_data_blocks.py",)
STREAM = ("tests/unit/test_data_stream.py",)
HOSTS = ("tests/distributed/test_train_text.py",)

MUTANTS = [
    Mutant(
        "blocks: each rank waits for its own samples alone",
        "llmtrain/data/loader.py",
        "self.order.wait_for(max(part[-1] for part in self.cursor.peek(0, self.global_batch)))",
        "pass",
        BLOCKS,
    ),
    Mutant(
        "blocks: a block is as large as what is there",
        "llmtrain/data/order.py",
        "return first, min([end, *(size for size in ends if size > index)])",
        "return first, max(index + 1, min([end, *ends, self._wait(first) if self._wait else end]))",
        BLOCKS,
    ),
    Mutant(
        "blocks: a block that a shorter run has cut is joined",
        "llmtrain/data/order.py",
        "ends = [*self.sizes, self.num_samples]",
        "ends = [self.num_samples]",
        BLOCKS,
    ),
    Mutant(
        "blocks: what has been read stays in memory",
        "llmtrain/data/order.py",
        "if epoch * self.num_samples + first + len(part) > before",
        "if True",
        BLOCKS,
    ),
    Mutant(
        "blocks: a window is read before its last token is there",
        "llmtrain/data/loader.py",
        "self.tokens.wait_for(samples * self.sequence_length + 1)",
        "self.tokens.wait_for(samples * self.sequence_length)",
        BLOCKS,
    ),
    Mutant(
        "stream: waiting for text counts as waiting for the disk",
        "llmtrain/data/loader.py",
        "if not self.loader.tokens.is_waiting(seconds):",
        "if True:",
        BLOCKS,
    ),
    Mutant(
        "stream: a complete block is committed with the next minute",
        "llmtrain/data/extend.py",
        "if self.is_due or self._completes_block():",
        "if self.is_due:",
        STREAM,
    ),
    Mutant(
        "stream: progress does not count",
        "llmtrain/data/stream.py",
        "before, moved = progress, now",
        "before = progress",
        STREAM,
    ),
    Mutant(
        "stream: more tokens than the run's are read",
        "llmtrain/data/stream.py",
        "self._tokens = TokenShards(self._shards, self.most)",
        "self._tokens = TokenShards(self._shards)",
        STREAM,
    ),
    Mutant(
        "stream: an error of the tokenizer is waited out",
        "llmtrain/data/stream.py",
        'if "error" in status:',
        "if False:",
        STREAM,
    ),
    Mutant(
        "stream: a tokenizer that fails is started for ever",
        "llmtrain/data/background.py",
        "if attempts >= ATTEMPTS:",
        "if attempts >= 20 * ATTEMPTS:",
        STREAM,
    ),
    Mutant(
        "stream: the tokenizer outlives the run",
        "llmtrain/data/background.py",
        "    threading.Thread(target=_watch_input, daemon=True).start()\n",
        "",
        STREAM,
    ),
    Mutant(
        "stream: the rate is that of all the time",
        "llmtrain/data/extend.py",
        "self._marks.popleft()",
        "break",
        ("tests/unit/test_data_prepare.py",),
    ),
    Mutant(
        "stream: hosts do not compare what has come since",
        "llmtrain/data/host_blocks.py",
        'if post["digest"] != posts[0]["digest"]:',
        "if False:",
        HOSTS,
    ),
    Mutant(
        "stream: a host's error is its own",
        "llmtrain/data/host_blocks.py",
        "{} if failed is None else {",
        "{} if True else {",
        HOSTS,
    ),
    Mutant(
        "stream: a host waits for itself alone",
        "llmtrain/data/host_blocks.py",
        "for host in self._hosts]\n        tokens.wait_until",
        'for host in self._hosts if self._store.check([f"text/{host}/{start}"])]\n        tokens.wait_until',
        HOSTS,
    ),
    Mutant(
        "stream: an interrupted commit is damaged",
        "llmtrain/data/extend.py",
        "self._pool.submit(self._complete).result()",
        "self._complete()",
        STREAM,
    ),
    Mutant(
        "stream: an error of another host is never temporary",
        "llmtrain/data/host_blocks.py",
        'failed.get("is_temporary", False)',
        "False",
        ("tests/unit/test_data_stream.py",),
    ),
    Mutant(
        "stream: text that is skipped is not reported",
        "llmtrain/data/sources.py",
        "                self._on_skipped(number)",
        "                pass",
        ("tests/unit/test_data_sources.py",),
    ),
    Mutant(
        "stream: all shards are opened at once",
        "llmtrain/data/dataset.py",
        "[LazyShard(shard, load) for shard in self.index.splits[split].shards]",
        "[load(shard) for shard in self.index.splits[split].shards]",
        ("tests/unit/test_data_stream.py",),
    ),
]
