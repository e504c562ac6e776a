"""Check of token ids, in memory or in another tool's file, against the vocabulary of a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

import numpy as np

BUFFER_TOKENS = 1 << 20


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary to which token ids should belong."""

    tokenizer: str
    """Value of the recipe's `data.tokenizer`."""
    size: int

    def first_wrong(self, ids: np.ndarray) -> int | None:
        """Return the position of the first id outside this vocabulary, or None if there is no such id."""
        if not len(ids) or (ids.max() < self.size and ids.min() >= 0):
            return None
        return int(np.argmax((ids < 0) | (ids >= self.size)))

    def describe(self, path: Path | str, position: int, token: int) -> str:
        """Return an error message about a `token` outside this vocabulary, at a `position` (from 0) in a file."""
        return (
            f"{path}: token {position:,} is {token:,}, but data.tokenizer={self.tokenizer} has {self.size:,} tokens; name the "
            "tokenizer that made this file"
        )

    def find_wrong(self, path: Path, dtype: str, offset: int, tokens: int) -> str | None:
        """Return an error message about the first token of a file outside this vocabulary, or about a file that is too short; None
        if the file is right. The `tokens` tokens after `offset` bytes are checked. The file is read and not memory-mapped, because
        a thread that waits for the disk in a read does not block other threads. Raises OSError."""
        buffer = np.empty(BUFFER_TOKENS, np.dtype(dtype))
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            for first in range(0, tokens, len(buffer)):
                ids = buffer[: tokens - first]
                if (count := _fill(file, ids)) < len(ids):
                    return f"{path}: ends after {first + count:,} of {tokens:,} tokens; copy it again"
                if (wrong := self.first_wrong(ids)) is not None:
                    return self.describe(path, first + wrong, int(ids[wrong]))
        return None


def _fill(file: RawIOBase, ids: np.ndarray) -> int:
    """Fill `ids` with tokens from the file, and return the number of tokens read, which is smaller at the end of the file."""
    view, filled = memoryview(ids).cast("B"), 0
    while filled < len(view) and (count := file.readinto(view[filled:])):
        filled += count
    return filled // ids.itemsize
