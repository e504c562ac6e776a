"""Documents of a split as samples, for training without packing.

The samples tile the tokens: sample i predicts tokens [starts[i], starts[i + 1]). A document with its eos is one sample, or
several if it is longer than a sequence: all but the last of them are full, and the last one may be a single token. Every
token is predicted once, from the earlier tokens of its sample and from the one token before the sample. That token is the
previous document's eos, or belongs to the same document if the sample is not the document's first. Before the first
document of a split, an eos is assumed.

The starts are found once per split and sequence length, and stored in the folder of the shards as
`<split>-samples-<length>.npy`: 8 bytes per sample, memory-mapped by all ranks of a host.
"""

from __future__ import annotations

import os
import tokenize
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from llmtrain.data.dataset import TokenDataset, TokenShards
from llmtrain.data.sources import Split
from llmtrain.errors import DataError
from llmtrain.waiting import announced

SCANNED_TOKENS = 1 << 24
"""Maximum number of tokens, or of samples, in memory at a time during a scan."""
CHECKED_STARTS = 64
"""Number of samples whose starts are compared with the tokens when a file is opened."""
LOCK_SECONDS = 3600.0
"""Maximum seconds to wait for another process that searches the same split."""


class DocumentSamples:
    """Samples of one split. The module's docstring describes them."""

    def __init__(self, tokens: TokenShards, starts: np.ndarray, eos_id: int) -> None:
        """Keep the samples that end within `tokens`. `starts` is int64 [samples + 1] and ascending. It may be from a
        longer text that begins with `tokens`. A sample that the end of `tokens` cuts is left out unless it is the first
        one, because in a longer run it would be longer, and would be sorted next to other samples."""
        self.tokens, self._starts, self._eos_id = tokens, starts, eos_id
        first = min(1, len(tokens), len(starts) - 1)
        self._count = max(int(np.searchsorted(starts, len(tokens), side="right")) - 1, first)
        self._end = min(int(starts[self._count]), len(tokens))

    def __len__(self) -> int:
        return self._count

    def lengths(self, samples: np.ndarray) -> np.ndarray:
        """Return the number of tokens that each of the samples predicts."""
        ends = np.minimum(self._starts[samples + 1], self._end)
        return ends - self._starts[samples]

    def count_within(self, tokens: int) -> int:
        """Return the largest n for which the first n samples have at most `tokens` tokens together."""
        if tokens >= self._end:
            return self._count
        return int(np.searchsorted(self._starts[1:], tokens, side="right"))

    def attended_length(self) -> float:
        """Return the length of a token's sample, averaged over all tokens. The work of attention is estimated from it."""
        squares = 0.0
        for first in range(0, self._count, SCANNED_TOKENS):
            lengths = self.lengths(np.arange(first, min(first + SCANNED_TOKENS, self._count)))
            squares += float(np.square(lengths.astype(np.float64)).sum())
        return squares / self._end

    def read(self, sample: int) -> np.ndarray:
        """Return the token before a sample and the sample's tokens: int64 [length + 1]. It is a copy, because a view
        would keep a file open."""
        start = int(self._starts[sample])
        end = min(int(self._starts[sample + 1]), self._end)
        if start == 0:
            return np.concatenate([np.array([self._eos_id]), self.tokens.window(0, end)])
        return self.tokens.window(start - 1, end - start + 1).astype(np.int64)


def document_samples(prepared: TokenDataset, split: Split, sequence_length: int, write: bool = True) -> DocumentSamples:
    """Return the documents of a split as samples of at most `sequence_length` predicted tokens.

    The starts are read from a file in the folder of the shards. If that file is missing, damaged or for another number
    of tokens, the starts are found again and, with `write`, stored there unless the folder is read-only. Raises
    DataError if the split has no eos token.
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
            f"{prepared.directory}: no {split} document ends, because the eos token {prepared.eos_id} does not occur in its "
            f"{len(whole):,} tokens; data.packing=none needs one after each document, so use data.packing=packed"
        )
    return DocumentSamples(prepared.tokens(split), starts, prepared.eos_id)


def find_starts(tokens: TokenShards, eos_id: int, sequence_length: int) -> np.ndarray:
    """Return the positions in `tokens` at which samples start, followed by the end of the last one: int64 [samples + 1].
    Tokens after the last eos are a document, too. Returns [0] if there is no eos."""
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
    """Return the starts of the samples of consecutive documents. The first document begins at `start`, and document i ends
    before position `ends[i]`, where the next one begins."""
    starts = np.concatenate([[start], ends[:-1]])
    samples = -(-(ends - starts) // sequence_length)
    before = np.cumsum(samples) - samples  # number of samples of all earlier documents
    number = np.arange(samples.sum()) - np.repeat(before, samples)  # index of each sample in its document
    return np.repeat(starts, samples) + number * sequence_length


def _stored(path: Path, tokens: TokenShards, eos_id: int, sequence_length: int) -> np.ndarray | None:
    """Return the starts in a file, memory-mapped, or None if it can't be read or can't belong to `tokens`."""
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
        and _has_lengths_up_to(starts, sequence_length)
    )
    if not is_plausible:
        return None
    for sample in np.linspace(1, len(starts) - 1, CHECKED_STARTS, dtype=np.int64)[: len(starts) - 2]:
        is_full = starts[sample] - starts[sample - 1] == sequence_length
        is_end = starts[sample] == len(tokens)
        if not (is_full or is_end or tokens.window(int(starts[sample]) - 1, 1)[0] == eos_id):
            return None
    return starts


def _has_lengths_up_to(starts: np.ndarray, sequence_length: int) -> bool:
    """Return whether each sample has at least one and at most `sequence_length` tokens."""
    for first in range(0, len(starts) - 1, SCANNED_TOKENS):
        lengths = np.diff(starts[first : first + SCANNED_TOKENS + 1])
        if lengths.min() < 1 or lengths.max() > sequence_length:
            return False
    return True


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
    except (OSError, NotImplementedError, Timeout):  # read-only, full, without file locks, or locked for too long
        with suppress(OSError):
            new.unlink(missing_ok=True)
        return None
