"""Extension of a prepared folder with more tokens of its source, from where it ends.

A text is read once for both splits. What is tokenized is committed every `COMMIT_SECONDS` and at the end, also at an
early one: shards are completed and flushed, then the index that names them is replaced. A killed process loses what it
has tokenized since. The order of tokens does not depend on interruptions.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from llmtrain.config import DataSection
from llmtrain.data.dataset import INDEX, Index, ShardWriter
from llmtrain.data.order import block_of
from llmtrain.data.sources import Split, TextStream, source_keys, splits_of
from llmtrain.files import atomic_write

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

    Encoded = list[int] | Encoding

BATCH_CHARACTERS = 1_000_000
"""Characters tokenized per batch. A batch is spread over the cores."""
PIECE_CHARACTERS = 1_000_000
"""Maximum characters per piece. Longer documents are tokenized in pieces, to bound memory."""
COMMIT_SECONDS = 60.0
"""Seconds of work that a killed process loses at most."""
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
    report: Callable[[int], None] | None = None,
) -> None:
    """Tokenize until each split has the tokens needed or its source has ended. The caller must hold the folder's lock.
    If a run reads meanwhile, `report` is called after each batch with the number of training tokens, and blocks are
    committed when they are complete."""
    folder = _GrowingFolder(directory, index, report)
    for key in source_keys(data):
        missing = {split: needed[split] for split in splits_of(data, key) if folder.lacks(split, needed[split])}
        if missing:
            starts = (folder.index.splits[split].position for split in missing)
            start = min(starts, key=lambda position: position.documents)
            _read_on(folder, TextStream(data, key, start), missing, tokenizer, show_progress)


def _read_on(
    folder: _GrowingFolder,
    stream: TextStream,
    missing: dict[Split, int],
    tokenizer: PreTrainedTokenizerBase,
    show_progress: bool,
) -> None:
    """Tokenize the stream until no split of `missing` lacks tokens, and commit it, whatever happens."""
    label = f"{' and '.join(sorted(missing))} tokens"
    remaining = sum(tokens - folder.index.splits[split].tokens for split, tokens in missing.items())
    if sys.maxsize in missing.values():  # whole files, of which the number of tokens is unknown
        remaining = sys.maxsize
    with ProgressBar(label, remaining, show_progress) as progress, folder.committed():
        for texts in _batches(stream, folder, missing):
            parts = _tokenize(tokenizer, texts)
            folder.add(parts, list(missing), stream)
            progress.advance(
                sum(part.text_bytes for part in parts.values()), sum(part.tokens for part in parts.values())
            )
            for split in [split for split, tokens in missing.items() if not folder.lacks(split, tokens)]:
                del missing[split]
            if not missing:
                return
        folder.end(missing, stream)


def _batches(
    stream: TextStream, folder: _GrowingFolder, missing: Mapping[Split, int]
) -> Iterator[list[tuple[Split, str]]]:
    """Yield batches of those documents of `missing` that the folder does not have. `missing` shrinks meanwhile."""
    starts = {split: folder.index.splits[split].position.documents for split in missing}
    batch: list[tuple[Split, str]] = []
    characters = 0
    for split, text in stream:
        if split in missing and stream.documents > starts[split]:
            batch.append((split, text))
            characters += len(text)
        # a split that needs little must not wait for a full batch from a stream that is mostly the other split
        most = max(tokens - folder.index.splits[split].tokens for split, tokens in missing.items())
        if characters >= min(BATCH_CHARACTERS, 6 * most) or folder.is_due:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@dataclass
class _Part:
    """Tokens that a batch adds to a split."""

    pieces: list[tuple[Encoded, bool]] = field(default_factory=list)
    """Token ids of the texts' pieces, in order, and whether a piece ends its text."""
    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0


def _tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[tuple[Split, str]]) -> dict[Split, _Part]:
    # tokenizers spreads a batch over the cores; setting this also silences its warning in processes that fork later
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    pieces = [
        (split, text[start : start + PIECE_CHARACTERS], start + PIECE_CHARACTERS >= len(text))
        for split, text in texts
        for start in range(0, len(text), PIECE_CHARACTERS)
    ]
    encoded = encode(tokenizer, [piece for _, piece, _ in pieces]) if pieces else []
    parts = {split: _Part() for split, _ in texts}
    for ids, (split, piece, is_last) in zip(encoded, pieces, strict=True):
        part = parts[split]
        part.pieces.append((ids, is_last))
        part.tokens += len(ids) + is_last
        part.documents += is_last
        part.text_bytes += len(piece.encode())
    return parts


def encode(tokenizer: PreTrainedTokenizerBase, pieces: list[str]) -> Sequence[Encoded]:
    """Encode pieces of text. An eos token quoted in a document is encoded as ordinary text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        options = {"add_special_tokens": False, "split_special_tokens": True, "return_attention_mask": False}
        return tokenizer(pieces, verbose=False, **options)["input_ids"]
    # Same ids without transformers' single-threaded work on offsets, which takes a third of the time on two cores.
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    return backend.encode_batch_fast(pieces, add_special_tokens=False)


class _GrowingFolder:
    """Prepared folder while it is extended."""

    def __init__(self, directory: Path, index: Index, report: Callable[[int], None] | None) -> None:
        self.index = index
        """The index with the counts of now. The one on disk, and the shards, are those of the last commit."""
        self._directory = directory
        dtype = np.dtype(index.dtype)
        self._writers = {
            split: ShardWriter(directory, split, dtype, entry.shards) for split, entry in index.splits.items()
        }
        self._writing: Future | None = None
        self._committed, self._report = time.monotonic(), report
        self._train_committed = index.splits["train"].tokens

    def lacks(self, split: Split, tokens: int) -> bool:
        """Return whether a split has fewer tokens although its source has more."""
        return not self.index.splits[split].exhausted and self.index.splits[split].tokens < tokens

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._committed >= COMMIT_SECONDS

    def add(self, parts: Mapping[Split, _Part], read: Iterable[Split], at: TextStream) -> None:
        """Add what was tokenized of the splits `read`. One thread writes while all cores tokenize the next batch."""
        if self._writing is not None:
            self._writing.result()
        self._writing = self._pool.submit(self._write, parts)
        position = at.position()
        for split in read:
            entry, part = self.index.splits[split], parts.get(split, _Part())
            if position.documents >= entry.position.documents:  # else this split was read further before
                counts = {name: getattr(entry, name) + getattr(part, name) for name in COUNTS}
                self._update(split, position=position, **counts)
        if self._report is not None:
            self._report(self.index.splits["train"].tokens)
        if self.is_due or self._completes_block():
            self._commit()

    def _completes_block(self) -> bool:
        """Return whether a run that reads meanwhile could read a block that is not committed yet. The window of a block's
        last sample ends one token after the block."""
        tokens = self.index.splits["train"].tokens
        return self._report is not None and tokens > block_of(max(self._train_committed - 1, 0))[1]

    def end(self, splits: Iterable[Split], at: TextStream) -> None:
        """Record that the source of these splits has ended."""
        for split in splits:
            self._update(split, position=at.position(), exhausted=True)

    def _update(self, split: Split, **entries: object) -> None:
        entry = self.index.splits[split].model_copy(update=entries)
        self.index = self.index.model_copy(update={"splits": {**self.index.splits, split: entry}})

    def _write(self, parts: Mapping[Split, _Part]) -> None:
        end = np.array([self.index.eos_id], dtype=np.uint32)
        for split, part in parts.items():
            arrays = (
                (np.array(ids if isinstance(ids, list) else ids.ids, dtype=np.uint32), end[: int(is_last)])
                for ids, is_last in part.pieces
            )
            self._writers[split].append(np.concatenate(list(itertools.chain.from_iterable(arrays))))

    @contextmanager
    def committed(self) -> Iterator[None]:
        """Commit at the end, also after an error, unless the disk is what failed."""
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
        """Complete the shards, then the index, in the thread that writes. An interruption of this one, such as Ctrl-C,
        would leave a shard that is half completed."""
        self._pool.submit(self._complete).result()

    def _complete(self) -> None:
        """Commit. Commits nothing if an interruption has separated the counts of shards and index."""
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
    """Counter of one split's text bytes and tokens, with a display of its progress toward the tokens needed."""

    def __init__(self, label: str, needed: int, show: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self.label, self.text_bytes, self.tokens, self._needed = label, 0, 0, needed
        self._console = Console(stderr=True, quiet=not show)
        # rich's bar shows nothing unless the console is a terminal; lines are printed instead
        columns = (BarColumn(bar_width=20), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task = self._bar.add_task(label, total=needed)
        self._shown = time.monotonic()
        self._marks = deque([(self._shown, 0)])
        """Times of the last RATE_SECONDS, and one before, and the tokens so far at each."""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def advance(self, text_bytes: int, tokens: int) -> None:
        self.text_bytes += text_bytes
        self.tokens += tokens
        self._marks.append((time.monotonic(), self.tokens))
        while len(self._marks) > 2 and self._marks[1][0] <= self._marks[-1][0] - RATE_SECONDS:
            self._marks.popleft()
        self._bar.update(self._task, completed=self.tokens, description=self.line())
        if not self._console.is_terminal and time.monotonic() - self._shown >= PLAIN_SECONDS:
            self._shown = time.monotonic()
            self._print()

    def line(self) -> str:
        (first, before), (last, now) = self._marks[0], self._marks[-1]
        rate = (now - before) / max(last - first, 1e-9)
        counts = f"{self.text_bytes / 1e6:,.1f} MB, {self.tokens / 1e6:,.2f} M tokens"
        line = f"{self.label}: {counts}, {rate / 1e6:.2f} M tokens/s"
        if 0 < self.tokens < self._needed < sys.maxsize and rate > 0:  # a file's number of tokens is unknown
            line += f", {(self._needed - self.tokens) / rate / 60:.0f} min left"
        return line

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if kind is None:
            self._print()

    def _print(self) -> None:
        self._console.print(self.line(), highlight=False, soft_wrap=True)
