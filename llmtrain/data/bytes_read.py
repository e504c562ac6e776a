"""Count of the bytes read from a source's files, from which the time left is estimated."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

Name = TypeVar("Name")


class BytesRead:
    """Counter of the bytes read from files. Of compressed files, it counts the compressed bytes."""

    def __init__(self) -> None:
        self.total = 0
        """Bytes of all files; 0 if unknown."""
        self.current: Callable[[], int] = int  # int() is 0
        """Function that returns the bytes read from the open file. The file's reader sets it."""
        self._before = 0

    def __int__(self) -> int:
        return self._before + self.current()

    def follow(self, raw: io.BufferedReader, size: int) -> None:
        """Count the bytes read from an open file of `size` bytes. Once the file is closed, all of them count as read."""
        self.current = lambda: size if raw.closed else raw.tell()

    def files(self, paths: list[Path]) -> Iterator[Path]:
        """Yield the files one after another. A file counts as completely read when the next one is requested."""
        sizes = [path.stat().st_size for path in paths]
        self.total = sum(sizes)
        for path, size in zip(paths, sizes, strict=True):
            yield path
            self._before, self.current = self._before + size, int

    def texts(self, texts: Iterable[tuple[Name, str]], total: int) -> Iterator[tuple[Name, str]]:
        """Yield the (name, text) pairs of small files of `total` bytes together, and count each text's bytes."""
        self.total = total
        for name, text in texts:
            self._before += len(text.encode())
            yield name, text
