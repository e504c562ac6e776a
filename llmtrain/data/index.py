"""Index and token shards of a prepared folder, and the checks made when the folder is opened.

<cache_dir>/<name>-<hash8>/index.json          read by this module
                           tokenizer/          as saved by transformers
                           train-00000.npy     token shards
                           validation-00000.npy
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import numpy as np
from pydantic import BaseModel, ValidationError

from llmtrain.data.sources import Split
from llmtrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    """Writer of the shards `<split>-00000.npy`, `<split>-00001.npy`, ... Keeps no tokens in memory between calls."""

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
        # numpy pads headers so that the first axis can grow in place; hence the second header is as long as the first
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


FORMAT = 1
INDEX = "index.json"
TOKENIZER = "tokenizer"


class SplitIndex(BaseModel, extra="forbid", frozen=True):
    """Index entry of one split."""

    tokens: int
    """Number of tokens, including one eos token per document."""
    documents: int
    text_bytes: int
    """UTF-8 bytes of the documents; nats per token x tokens / text_bytes / ln 2 = bits per byte."""
    exhausted: bool
    """True if the source ended before the requested number of tokens was reached."""
    shards: tuple[Shard, ...]


class Index(BaseModel, extra="forbid", frozen=True):
    """Schema of index.json."""

    format: Literal[1]
    source: str
    tokenizer: str
    vocab_size: int
    eos_id: int
    dtype: Literal["<u2", "<u4"]
    splits: dict[Split, SplitIndex]


@dataclass(frozen=True)
class TokenDataset:
    """Prepared token shards on disk, checked when opened."""

    directory: Path
    index: Index
    limits: Mapping[Split, int] = field(default_factory=dict)
    """Tokens per split that the recipe asks for. A run reads the same tokens even if an earlier run prepared more."""

    @property
    def vocab_size(self) -> int:
        return self.index.vocab_size

    @property
    def eos_id(self) -> int:
        return self.index.eos_id

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.index.dtype)

    def tokens(self, split: Split) -> TokenShards:
        """Return all tokens of a split up to the recipe's limit, memory-mapped."""
        arrays = [np.load(self.directory / shard.name, mmap_mode="r") for shard in self.index.splits[split].shards]
        return TokenShards(arrays, self.limits.get(split))

    def bytes_per_token(self, split: Split) -> float:
        """Return the mean number of UTF-8 bytes of text per token."""
        return self.index.splits[split].text_bytes / self.index.splits[split].tokens

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer that produced the tokens. Needs no network."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.directory / TOKENIZER)


def open_dataset(directory: Path | str, limits: Mapping[Split, int] | None = None) -> TokenDataset:
    """Open a prepared folder. Raises DataError if the index or a shard is missing, truncated or inconsistent."""
    directory = Path(directory)
    remedy = f"delete {directory} and prepare again"
    try:
        index = Index.model_validate_json((directory / INDEX).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{directory / INDEX}: no such file; expected a folder made by prepare; {remedy}") from None
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "the file"
        raise DataError(f"{directory / INDEX}: {where}: {problem['msg']}; {remedy}") from None
    for split in index.splits.values():
        for shard in split.shards:
            path = directory / shard.name
            if not path.is_file():
                raise DataError(f"{path}: no such file; expected {shard.bytes} bytes; {remedy}")
            if (size := path.stat().st_size) != shard.bytes:
                raise DataError(f"{path}: {size} bytes found, {shard.bytes} expected; {remedy}")
            try:
                array = np.load(path, mmap_mode="r")
                found = f"{array.dtype.str} {array.shape}"
            except ValueError as error:
                found = str(error)
            if found != (expected := f"{index.dtype} {(shard.tokens,)}"):
                raise DataError(f"{path}: another file's content ({found} found, {expected} expected); {remedy}")
    return TokenDataset(directory, index, limits or {})
