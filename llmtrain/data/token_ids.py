"""Check that token ids are of a tokenizer's vocabulary, in memory and in another tool's file."""

from __future__ import annotations

from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

import numpy as np

BUFFER_TOKENS = 1 << 20


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary that token ids should be of."""

    tokenizer: str
    """Key of the recipe, `data.tokenizer`."""
    size: int

    def first_wrong(self, ids: np.ndarray) -> int | None:
        """Return the position of the first id that is not of this vocabulary, or None."""
        if not len(ids) or (ids.max() < self.size and ids.min() >= 0):
            return None
        return int(np.argmax((ids < 0) | (ids >= self.size)))

    def describe(self, path: Path | str, position: int, token: int) -> str:
        """Return the line about a token in a file that is not of this vocabulary."""
        return (
            f"{path}: token {position:,} is {token:,}, but data.tokenizer={self.tokenizer} has {self.size:,} tokens; name the "
            "tokenizer that made this file"
        )

    def find_wrong(self, path: Path, dtype: str, offset: int, tokens: int) -> str | None:
        """Return the line about the first token in a part of a file that is not of this vocabulary, or None. `offset` is
        in bytes. The file is read instead of memory-mapped, because a read that waits for the disk does not block other
        threads. Raises OSError."""
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
    """Read tokens into `ids` and return how many the file still had."""
    view, filled = memoryview(ids).cast("B"), 0
    while filled < len(view) and (count := file.readinto(view[filled:])):
        filled += count
    return filled // ids.itemsize
