"""Token shards: plain .npy files of uint16 or uint32, written incrementally and read memory-mapped as one sequence."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from pydantic import BaseModel

SHARD_TOKENS = 100_000_000
"""Tokens per full shard: 200 MB as uint16, 400 MB as uint32."""


class Shard(BaseModel, extra="forbid", frozen=True):
    """Index entry of one shard file."""

    name: str
    tokens: int
    bytes: int
    crc32: int
    """CRC-32 of the tokens, without the .npy header."""


class ShardWriter:
    """Writer that appends tokens to `<split>-00000.npy`, `<split>-00001.npy`, ... and keeps none in memory between
    calls."""

    def __init__(self, directory: Path, split: str, dtype: np.dtype, shard_tokens: int = SHARD_TOKENS) -> None:
        self.directory, self.split, self.dtype, self.shard_tokens = directory, split, dtype, shard_tokens
        self.shards: list[Shard] = []
        self._file: BinaryIO | None = None
        self._tokens = self._crc32 = 0

    def append(self, ids: np.ndarray) -> None:
        ids = ids.astype(self.dtype, copy=False)
        while len(ids):
            if self._file is None:
                self._file = (self.directory / f"{self.split}-{len(self.shards):05d}.npy").open("wb")
                self._write_header()
            part = ids[: self.shard_tokens - self._tokens]
            raw = part.tobytes()
            self._file.write(raw)
            self._crc32 = zlib.crc32(raw, self._crc32)
            self._tokens += len(part)
            ids = ids[len(part) :]
            if self._tokens == self.shard_tokens:
                self.close()

    def close(self) -> None:
        """Complete the open shard and flush it to disk."""
        if self._file is None:
            return
        size = self._file.tell()
        self._file.seek(0)
        self._write_header()
        fsync_and_close(self._file)
        name = Path(self._file.name).name
        self.shards.append(Shard(name=name, tokens=self._tokens, bytes=size, crc32=self._crc32))
        self._file, self._tokens, self._crc32 = None, 0, 0

    def _write_header(self) -> None:
        # numpy pads headers so that the first axis can grow in place: the second header is as long as the first
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self._tokens,)}
        np.lib.format.write_array_header_1_0(self._file, header)


class TokenShards:
    """Sequence of tokens over several arrays, read without loading them into memory."""

    def __init__(self, arrays: Sequence[np.ndarray], limit: int | None = None) -> None:
        """Limit the sequence to its first `limit` tokens."""
        self._arrays = arrays
        self._ends = list(itertools.accumulate(map(len, arrays)))
        total = self._ends[-1] if self._ends else 0
        self._length = total if limit is None else min(limit, total)

    def __len__(self) -> int:
        return self._length

    def window(self, start: int, length: int) -> np.ndarray:
        """Return tokens [start, start + length) in the shards' dtype, joined across shards if necessary. The array
        may be a read-only view."""
        assert start >= 0 and length > 0 and start + length <= self._length, (start, length, self._length)
        index = int(np.searchsorted(self._ends, start, side="right"))
        parts = []
        while length:
            first = start - (self._ends[index] - len(self._arrays[index]))
            parts.append(self._arrays[index][first : first + length])
            start, length, index = start + len(parts[-1]), length - len(parts[-1]), index + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def fsync_and_close(file: BinaryIO) -> None:
    """Flush a file to disk, not only to the kernel, and close it."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
