"""Documents of a split as samples, for training without packing.

The samples tile the tokens: sample i predicts tokens starts[i] to starts[i + 1]. A document with its eos is one sample, or
several if it is longer than a sequence: all but the last of them are full, and the last one may be a single token. Every
token is predicted once, from the tokens before it in its sample and one more: of a document's first sample, the eos
before the document; of a later one, the token before it. A split begins as if an eos came before it.

The starts are found once per split and sequence length, and kept beside the shards as `<split>-samples-<length>.npy`:
8 bytes per sample, memory-mapped by all ranks of a host.
"""

from __future__ import annotations

import os
import tokenize
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from llmtrain.data.dataset import TokenDataset, TokenShards
from llmtrain.data.sources import Split
from llmtrain.errors import DataError
from llmtrain.waiting import announced

SCANNED_TOKENS = 1 << 24
"""Tokens in memory at a time while eos tokens are searched."""
CHECKED_STARTS = 64
"""Number of samples whose starts are compared with the tokens when a file is opened."""
LOCK_SECONDS = 3600.0
"""Seconds to wait for another process that searches the same split."""


class DocumentSamples:
    """Samples of one split; see this module."""

    def __init__(self, tokens: TokenShards, starts: np.ndarray, eos_id: int) -> None:
        """Take the samples that begin in `tokens`, which may be fewer than those from which `starts` were found: int64
        [samples + 1], ascending."""
        self.tokens, self._starts, self._eos_id = tokens, starts, eos_id
        self._count = min(int(np.searchsorted(starts, len(tokens))), len(starts) - 1)

    def __len__(self) -> int:
        return self._count

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        """Return the number of tokens that each of the samples predicts."""
        ends = np.minimum(self._starts[samples + 1], len(self.tokens))
        return ends - self._starts[samples]

    def count_within(self, tokens: int) -> int:
        """Return how many of the first samples have at most this many tokens together."""
        if tokens >= len(self.tokens):
            return self._count
        return int(np.searchsorted(self._starts[1:], tokens, side="right"))

    def attended_length(self) -> float:
        """Return the length of the sample in which a token is, averaged over all tokens."""
        squares = 0.0
        for first in range(0, self._count, SCANNED_TOKENS):
            lengths = self.lengths(np.arange(first, min(first + SCANNED_TOKENS, self._count)))
            squares += float(np.square(lengths.astype(np.float64)).sum())
        return squares / len(self.tokens)

    def read(self, sample: int) -> np.ndarray:
        """Return the token before a sample and the sample's tokens: [length + 1]."""
        start = int(self._starts[sample])
        end = min(int(self._starts[sample + 1]), len(self.tokens))
        if start == 0:
            return np.concatenate([np.array([self._eos_id]), self.tokens.window(0, end)])
        return self.tokens.window(start - 1, end - start + 1)


def document_samples(prepared: TokenDataset, split: Split, sequence_length: int, write: bool = True) -> DocumentSamples:
    """Return the documents of a split as samples of at most `sequence_length` predicted tokens.

    Their starts are read from the folder of the shards. If they are not there, are damaged or are of fewer tokens, they
    are found anew, and with `write` stored there unless the folder is read-only. Raises DataError if no document ends.
    """
    path = prepared.directory / f"{split}-samples-{sequence_length}.npy"
    whole = TokenDataset(prepared.directory, prepared.index).tokens(split)
    starts = _stored(path, whole, prepared.eos_id, sequence_length)
    if starts is None:
        with announced(f"the ends of documents to be found in {len(whole):,} {split} tokens of {prepared.directory}"):
            if write:
                starts = _find_and_store(path, whole, prepared.eos_id, sequence_length)
            if starts is None:
                starts = find_starts(whole, prepared.eos_id, sequence_length)
    if len(whole) and len(starts) == 1:
        raise DataError(
            f"{prepared.directory}: no {split} document ends, because the eos token {prepared.eos_id} is none of its "
            f"{len(whole):,} tokens; data.packing=none needs one after each document, so use data.packing=packed"
        )
    return DocumentSamples(prepared.tokens(split), starts, prepared.eos_id)


def find_starts(tokens: TokenShards, eos_id: int, sequence_length: int) -> np.ndarray:
    """Return where samples start in `tokens`, and last where they end: int64 [samples + 1]. Tokens after the last eos are
    a document, too. Returns [0] if there is no eos."""
    parts, start = [], 0
    for ends in _document_ends(tokens, eos_id):
        parts.append(_cut(start, ends, sequence_length))
        start = int(ends[-1])
    if start:
        if start < len(tokens):
            parts.append(_cut(start, np.array([len(tokens)]), sequence_length))
        parts.append(np.array([len(tokens)]))
    return np.concatenate(parts) if parts else np.zeros(1, dtype=np.int64)


def _document_ends(tokens: TokenShards, eos_id: int) -> Iterator[np.ndarray]:
    """Yield the positions after eos tokens, in ascending order."""
    for first in range(0, len(tokens), SCANNED_TOKENS):
        part = tokens.window(first, min(SCANNED_TOKENS, len(tokens) - first))
        ends = np.flatnonzero(part == eos_id) + first + 1
        if len(ends):
            yield ends


def _cut(start: int, ends: np.ndarray, sequence_length: int) -> np.ndarray:
    """Return the starts of the samples of documents that follow each other from `start` and end at `ends`."""
    starts = np.concatenate([[start], ends[:-1]])
    samples = -(-(ends - starts) // sequence_length)
    before = np.cumsum(samples) - samples  # samples of the documents before
    number = np.arange(samples.sum()) - np.repeat(before, samples)  # of a sample in its document
    return np.repeat(starts, samples) + number * sequence_length


def _stored(path: Path, tokens: TokenShards, eos_id: int, sequence_length: int) -> np.ndarray | None:
    """Return the starts in a file, memory-mapped, or None if they are not there or can't be those of `tokens`."""
    try:
        starts = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError, SyntaxError, tokenize.TokenError):  # NumPy parses the header as Python
        return None
    is_plausible = (
        starts.dtype == np.int64
        and starts.ndim == 1
        and len(starts) > 1
        and starts[0] == 0
        and starts[-1] == len(tokens)
        and all(
            lengths.min() > 0 and lengths.max() <= sequence_length
            for first in range(0, len(starts) - 1, SCANNED_TOKENS)
            for lengths in [np.diff(starts[first : first + SCANNED_TOKENS + 1])]
        )
    )
    if not is_plausible:
        return None
    for sample in np.linspace(1, len(starts) - 1, CHECKED_STARTS, dtype=np.int64)[: len(starts) - 2]:
        is_full = starts[sample] - starts[sample - 1] == sequence_length
        is_end = starts[sample] == len(tokens)
        if not (is_full or is_end or tokens.window(int(starts[sample]) - 1, 1)[0] == eos_id):
            return None
    return starts


def _find_and_store(path: Path, tokens: TokenShards, eos_id: int, sequence_length: int) -> np.ndarray | None:
    """Find the starts and store them, or wait for another process that does. Return None if they can't be stored."""
    new = path.with_suffix(".tmp")
    try:
        with FileLock(path.with_suffix(".lock"), timeout=LOCK_SECONDS):
            if (starts := _stored(path, tokens, eos_id, sequence_length)) is not None:
                return starts
            starts = find_starts(tokens, eos_id, sequence_length)
            with new.open("wb") as file:
                np.save(file, starts)
                file.flush()
                os.fsync(file.fileno())
            new.rename(path)
            return starts
    except (OSError, NotImplementedError, Timeout):  # read-only, full, or without locks
        return None
