"""Extension of a prepared folder with more tokens of its source, from the position at which the folder's text ends.

A text is read once for both splits. Tokens are committed every `COMMIT_SECONDS`, at the end, and after an error or
interruption: the shards are completed and flushed, and then the index that names them is replaced. A process that is
killed loses the tokens since its last commit. The order of tokens does not depend on interruptions.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from llmtrain.config import DataSection
from llmtrain.data.dataset import INDEX, Index, ShardWriter
from llmtrain.data.order import block_of
from llmtrain.data.sources import Position, Split, TextStream, source_keys, splits_of
from llmtrain.data.tokenizing import Batch, BatchTokenizer, Part, processes_of
from llmtrain.files import atomic_write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_CHARACTERS = 1_000_000
"""Characters in a full batch."""
SMALLEST_BATCHES = 100
"""Size of a full batch divided by that of the smallest one, which is for a split that lacks few tokens."""
CHARACTERS_PER_TOKEN = 6
"""Upper estimate of the mean number of characters per token. It limits a batch for a split that lacks few tokens."""
COMMIT_SECONDS = 60.0
"""Seconds between two commits. A killed process loses about this much work at most."""
COUNTS = ("tokens", "documents", "text_bytes")
RATE_SECONDS = 60.0
"""Seconds over which the rate of the progress line is measured."""
PLAIN_SECONDS = 10.0
"""Seconds between lines of progress if the output is not a terminal."""


def extend(
    directory: Path,
    index: Index,
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    needed: Mapping[Split, int],
    show_progress: bool,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Tokenize until each split has the tokens needed or its source has ended. The caller must hold the folder's lock.

    Pass `on_progress` if a run reads the folder at the same time. It is called after each batch, and while text is
    skipped, with the numbers of training tokens and of skipped documents. With `on_progress`, each block is committed
    as soon as it is complete. Raises DataError if the source can't be read or tokenized.
    """
    folder = _GrowingFolder(directory, index, on_progress)
    for key in source_keys(data):
        missing = {split: needed[split] for split in splits_of(data, key) if folder.lacks(split, needed[split])}
        if missing:
            starts = (folder.index.splits[split].position for split in missing)
            start = min(starts, key=lambda position: position.documents)
            stream = TextStream(data, key, start, folder.announce_progress)
            _read_on(folder, stream, missing, tokenizer, data, show_progress)


def _read_on(
    folder: _GrowingFolder,
    stream: TextStream,
    missing: dict[Split, int],
    tokenizer: PreTrainedTokenizerBase,
    data: DataSection,
    show_progress: bool,
) -> None:
    """Tokenize the stream until it ends or no split lacks tokens, and commit the tokens, also after an error unless it is an
    OSError. Splits that have enough tokens are removed from `missing`."""
    label = f"{' and '.join(sorted(missing))} tokens"
    reads_both = len(missing) > 1
    remaining = sum(tokens - folder.index.splits[split].tokens for split, tokens in missing.items())
    if sys.maxsize in missing.values():  # complete files, whose number of tokens is unknown
        remaining = sys.maxsize
    with (
        ProgressBar(label, remaining, show_progress) as progress,
        BatchTokenizer(tokenizer, folder.index.eos_id, processes_of(data.num_proc)) as batches,
        folder.committed(),
    ):
        for tokenized, position in batches.in_order(_batches(stream, folder, missing)):
            parts = {split: part for split, part in tokenized.items() if split in missing}
            folder.add(parts, list(missing), position)
            progress.advance(
                sum(part.text_bytes for part in parts.values()),
                sum(part.tokens for part in parts.values()),
                int(stream.bytes_read),
                stream.bytes_read.total,
            )
            for split in [split for split, tokens in missing.items() if not folder.lacks(split, tokens)]:
                del missing[split]
            if reads_both and [*missing] == ["validation"]:  # from here on, most of the text that is read is skipped
                reads_both = False
                label = f"validation tokens, {100 * data.validation_fraction:g} % of the text that is read"
                progress.switch_to(label, folder.index.splits["validation"].tokens, missing["validation"])
            if not missing:
                return
        folder.end(missing, stream.position())


def _batches(
    stream: TextStream, folder: _GrowingFolder, missing: Mapping[Split, int]
) -> Iterator[tuple[Batch, Position]]:
    """Yield batches of the documents of the splits in `missing` that the folder does not have yet, each with the stream's
    position after it. The caller removes splits from `missing` while it iterates.

    A batch ends when it has enough characters, or when a commit is due. The number of characters depends on the text
    alone and not on the tokens that exist by then, so that any number of processes prepares the same tokens.
    """
    starts = {split: folder.index.splits[split].position.documents for split in missing}
    left = {split: CHARACTERS_PER_TOKEN * (missing[split] - folder.index.splits[split].tokens) for split in missing}
    batch: Batch = []
    characters = 0
    for split, text in stream:
        if split in starts and stream.documents > starts[split]:
            characters += len(text)
            left[split] -= len(text)
            if split in missing:
                batch.append((split, text))
        # a split that lacks few tokens must not wait for a full batch from a stream that is mostly of the other split
        enough = max(BATCH_CHARACTERS // SMALLEST_BATCHES, *left.values())
        if characters >= min(BATCH_CHARACTERS, enough) or folder.is_commit_due:
            yield batch, stream.position()
            batch, characters = [], 0
    if batch:
        yield batch, stream.position()


class _GrowingFolder:
    """Prepared folder that is being extended: the next index, and the shards that are being written."""

    def __init__(self, directory: Path, index: Index, on_progress: Callable[[int, int], None] | None) -> None:
        self.index = index
        """Index with the current counts. The index on disk, and the shards that either index names, are those of the last
        commit."""
        self._directory = directory
        dtype = np.dtype(index.dtype)
        self._writers = {
            split: ShardWriter(directory, split, dtype, entry.shards) for split, entry in index.splits.items()
        }
        self._pool: ThreadPoolExecutor
        """Thread that writes; it exists within `committed`."""
        self._writing: Future | None = None
        self._committed, self._on_progress = time.monotonic(), on_progress
        self._train_committed = index.splits["train"].tokens

    def lacks(self, split: Split, tokens: int) -> bool:
        """Return whether a split has fewer than `tokens` tokens and its source has not ended."""
        return not self.index.splits[split].exhausted and self.index.splits[split].tokens < tokens

    @property
    def is_commit_due(self) -> bool:
        return time.monotonic() - self._committed >= COMMIT_SECONDS

    def add(self, parts: Mapping[Split, Part], read: Iterable[Split], position: Position) -> None:
        """Add the `parts` of a batch, and record that the splits `read` have been read up to a position. A thread writes the
        tokens while all cores tokenize the next batch."""
        if self._writing is not None:
            self._writing.result()
        self._writing = self._pool.submit(self._write, parts)
        for split in read:
            entry, part = self.index.splits[split], parts.get(split, Part())
            if position.documents >= entry.position.documents:  # else an earlier call has read this split further
                counts = {name: getattr(entry, name) + getattr(part, name) for name in COUNTS}
                self._update(split, position=position, **counts)
        self.announce_progress()
        if self.is_commit_due or self._completes_block():
            self._commit()

    def announce_progress(self, skipped: int = 0) -> None:
        """Call `on_progress`, if given, with the numbers of training tokens and of documents `skipped` so far."""
        if self._on_progress is not None:
            self._on_progress(self.index.splits["train"].tokens, skipped)

    def _completes_block(self) -> bool:
        """Return whether a run reads the folder at the same time and a complete block is not committed yet. A block is
        complete with the token after it, because the window of its last sample ends with that token."""
        tokens = self.index.splits["train"].tokens
        return self._on_progress is not None and tokens > block_of(max(self._train_committed - 1, 0))[1]

    def end(self, splits: Iterable[Split], position: Position) -> None:
        """Record that the source of these splits has ended."""
        for split in splits:
            self._update(split, position=position, exhausted=True)

    def _update(self, split: Split, **entries: object) -> None:
        entry = self.index.splits[split].model_copy(update=entries)
        self.index = self.index.model_copy(update={"splits": {**self.index.splits, split: entry}})

    def _write(self, parts: Mapping[Split, Part]) -> None:
        for split, part in parts.items():
            self._writers[split].append(part.ids(self.index.eos_id))

    @contextmanager
    def committed(self) -> Iterator[None]:
        """Commit at the end and after an error, except for an OSError, because then the disk may have failed."""
        with ThreadPoolExecutor(1) as self._pool:
            try:
                yield
                self._commit()
            except OSError:
                for writer in self._writers.values():
                    writer.discard()
                raise
            except BaseException:
                self._commit()
                raise

    def _commit(self) -> None:
        """Complete the shards and then the index, in the writing thread. In the calling thread, an interruption such as
        Ctrl-C could leave a shard half completed."""
        self._pool.submit(self._complete).result()

    def _complete(self) -> None:
        """Complete the shards. Replace the index unless an interruption has left it with other counts than the shards."""
        if self._writing is not None:
            self._writing.result()
        for split, writer in self._writers.items():
            writer.close()
            self._update(split, shards=tuple(writer.shards))
        if all(sum(shard.tokens for shard in entry.shards) == entry.tokens for entry in self.index.splits.values()):
            atomic_write(self._directory / INDEX, self.index.model_dump_json(indent=1))
            self._train_committed = self.index.splits["train"].tokens
        self._committed = time.monotonic()


class ProgressBar:
    """Counter of text bytes and tokens, with a display of its progress toward the tokens needed or the end of the files."""

    def __init__(self, label: str, needed: int, show: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self.label = label
        self.text_bytes, self.tokens, self._needed = 0, 0, needed
        self._total_bytes = 0
        self._console = Console(stderr=True, quiet=not show)
        # rich's bar shows nothing unless the console is a terminal; lines are printed instead
        columns = (BarColumn(bar_width=20), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task = self._bar.add_task(label, total=needed)
        self._shown = time.monotonic()
        self._marks: deque[tuple[float, int, int]] = deque()
        """(Time, tokens so far, bytes of files read so far) after each batch of the last RATE_SECONDS, and after one before."""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def advance(self, text_bytes: int, tokens: int, bytes_read: int = 0, total_bytes: int = 0) -> None:
        """Count a batch of `text_bytes` and `tokens`. `bytes_read` of the `total_bytes` of all files have been read, skipped text
        included. Both are 0 if they are unknown."""
        if not self._marks:  # text that a continued preparation has skipped, at another speed, is not in the rate
            self._marks.append((self._shown, self.tokens, bytes_read))
        self.text_bytes += text_bytes
        self.tokens += tokens
        self._total_bytes = total_bytes
        self._marks.append((time.monotonic(), self.tokens, bytes_read))
        while len(self._marks) > 2 and self._marks[1][0] <= self._marks[-1][0] - RATE_SECONDS:
            self._marks.popleft()
        is_by_bytes = self._needed == sys.maxsize and total_bytes
        done, total = (bytes_read, total_bytes) if is_by_bytes else (self.tokens, self._needed)
        self._bar.update(self._task, completed=done, total=total, description=self.line())
        if not self._console.is_terminal and time.monotonic() - self._shown >= PLAIN_SECONDS:
            self._shown = time.monotonic()
            self._print()

    def switch_to(self, label: str, tokens: int, needed: int) -> None:
        """Show the progress of another count from now on, which already has `tokens` of the `needed` tokens."""
        self.label = label
        self.text_bytes, self.tokens, self._needed = 0, tokens, needed
        self._marks.clear()
        self._shown = time.monotonic()

    def line(self) -> str:
        """Return the counts so far, their rate in the last RATE_SECONDS and, if it can be estimated, the time left."""
        marks = self._marks or [(0.0, 0, 0)]
        first, tokens_before, read_before = marks[0]
        last, tokens, read = marks[-1]
        seconds = max(last - first, 1e-9)
        rate = (tokens - tokens_before) / seconds
        counts = f"{self.text_bytes / 1e6:,.1f} MB, {self.tokens / 1e6:,.2f} M tokens"
        line = f"{self.label}: {counts}, {rate / 1e6:.2f} M tokens/s"
        left = []
        if 0 < self.tokens < self._needed < sys.maxsize and rate > 0:
            left.append((self._needed - self.tokens) / rate)
        if read_before < read < self._total_bytes:
            left.append((self._total_bytes - read) / (read - read_before) * seconds)
        if left:
            line += f", {min(left) / 60:.0f} min left"
        return line

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if kind is None:
            self._total_bytes = 0  # so that the last line shows no time left, even if the rest of the files has no text
            self._print()

    def _print(self) -> None:
        self._console.print(self.line(), highlight=False, soft_wrap=True)
