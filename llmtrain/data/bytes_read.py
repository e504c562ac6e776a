"""Bytes read of a source's files, from which the time left is estimated."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

Name = TypeVar("Name")


class BytesRead:
    """Counter of the bytes that are read of files, which may be compressed."""

    def __init__(self) -> None:
        self.total = 0
        """Bytes of all files; 0 if unknown."""
        self.current: Callable[[], int] = int
        """Function that returns the bytes read of the open file. Its reader sets it."""
        self._before = 0

    def __int__(self) -> int:
        return self._before + self.current()

    def follow(self, raw: io.BufferedReader, size: int) -> None:
        """Count the bytes that are read of an open file of `size` bytes, also after it is closed."""
        self.current = lambda: size if raw.closed else raw.tell()

    def files(self, paths: list[Path]) -> Iterator[Path]:
        """Yield the files one after the other, to be read completely."""
        sizes = [path.stat().st_size for path in paths]
        self.total = sum(sizes)
        for path, size in zip(paths, sizes, strict=True):
            yield path
            self._before, self.current = self._before + size, int

    def texts(self, texts: Iterable[tuple[Name, str]], total: int) -> Iterator[tuple[Name, str]]:
        """Yield the texts of small files that have `total` bytes together."""
        self.total = total
        for name, text in texts:
            self._before += len(text.encode())
            yield name, text
