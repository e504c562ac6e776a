"""Token dataset: the index and the token shards of a prepared folder, and their checks.

<cache_dir>/<name>-<hash8>/index.json          read by this module
                           tokenizer/          as saved by transformers
                           train-00000.npy     token shards
                           validation-00000.npy

Sizes and headers are checked whenever a folder is opened. After each start, the tokens of all nodes are compared
(`same_tokens`), and the ranks of a node verify the shards' checksums in the background (`checksum_scan`).
"""

from __future__ import annotations

import itertools
import os
import tokenize
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from llmtrain.data.sources import SPLITS, Position, Split
from llmtrain.data.token_ids import Vocabulary
from llmtrain.data.tokenizer import read_tokenizer
from llmtrain.data.tokens import Tokens
from llmtrain.errors import DataError, UnavailableError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


FORMAT = 2
INDEX = "index.json"
TOKENIZER = "tokenizer"
SHARD_TOKENS = 100_000_000
"""Tokens per full shard: 200 MB as uint16, 400 MB as uint32."""


class Shard(BaseModel, extra="forbid", frozen=True):
    """Index entry of one shard file, or of a part of a token file that another tool wrote."""

    name: str
    """Name in the folder, or the absolute path of another tool's file."""
    tokens: int
    bytes: int
    """Size of the file."""
    crc32: int | None = None
    """CRC-32 of the tokens, without the .npy header; None for another tool's file."""
    offset: int | None = None
    """Bytes before the tokens in another tool's file, or None for an .npy file of this folder."""
    dtype: str | None = None
    """Type of the tokens in another tool's file."""


class ShardWriter:
    """Writer of the shards `<split>-00000.npy`, `<split>-00001.npy`, ... It keeps no tokens in memory between calls."""

    def __init__(self, directory: Path, split: str, dtype: np.dtype, shards: Iterable[Shard] = ()) -> None:
        """Continue after the complete `shards`. A later file, left by an interrupted process, is overwritten."""
        self.directory, self.split, self.dtype = directory, split, dtype
        self.shards = list(shards)
        self._file: BinaryIO | None = None
        self._tokens = self._crc32 = 0

    def append(self, ids: np.ndarray) -> None:
        ids = ids.astype(self.dtype, copy=False)
        while len(ids):
            if self._file is None:
                self._file = (self.directory / f"{self.split}-{len(self.shards):05d}.npy").open("wb")
                self._write_header()
            part = ids[: SHARD_TOKENS - self._tokens]
            raw = part.tobytes()
            self._file.write(raw)
            self._crc32 = zlib.crc32(raw, self._crc32)
            self._tokens += len(part)
            ids = ids[len(part) :]
            if self._tokens == SHARD_TOKENS:
                self.close()

    def close(self) -> None:
        """Complete the open shard and flush it to disk."""
        if self._file is None:
            return
        size = self._file.tell()
        self._file.seek(0)
        self._write_header()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        name = Path(self._file.name).name
        self.shards.append(Shard(name=name, tokens=self._tokens, bytes=size, crc32=self._crc32))
        self._file, self._tokens, self._crc32 = None, 0, 0

    def discard(self) -> None:
        """Close and remove the open file without completing its shard."""
        if self._file is not None:
            with suppress(OSError):  # closing flushes, which fails on a full disk
                self._file.close()
            with suppress(OSError):
                os.unlink(self._file.name)
            self._file = None

    def _write_header(self) -> None:
        # numpy pads headers so that the first axis can grow in place; hence the second header is as long as the first
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self._tokens,)}
        np.lib.format.write_array_header_1_0(self._file, header)


OPEN_SHARDS = 256
"""Maximum number of shards that a process keeps memory-mapped for later reads. Each needs a file descriptor, and the
limit of a process is often 1,024. A view of a shard's tokens keeps it mapped for longer."""


@lru_cache(maxsize=OPEN_SHARDS)
def open_shard(directory: Path, shard: Shard) -> np.ndarray:
    """Return the tokens of a shard in a prepared folder, memory-mapped. All texts and ranks of a process share the open shards."""
    path = directory / shard.name  # the path of another tool's file is absolute
    if shard.offset is None:
        return np.load(path, mmap_mode="r")
    return np.memmap(path, np.dtype(shard.dtype), "r", shard.offset, (shard.tokens,))


class LazyShard:
    """Shard that is memory-mapped when it is read."""

    def __init__(self, directory: Path, shard: Shard) -> None:
        self._directory, self._shard = directory, shard

    def __len__(self) -> int:
        return self._shard.tokens

    def __getitem__(self, part: slice) -> np.ndarray:
        try:
            array = open_shard(self._directory, self._shard)
        except (OSError, ValueError) as error:  # deleted or truncated since the start
            raise unavailable(f"{self._shard.name}: can't be read any more", error) from None
        return array[part]


class TokenShards(Tokens):
    """Sequence of tokens over several arrays, read without loading them into memory."""

    def __init__(self, arrays: Sequence[np.ndarray | LazyShard], limit: int | None = None) -> None:
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


class SplitIndex(BaseModel, extra="forbid", frozen=True):
    """Index entry of one split."""

    tokens: int
    """Number of tokens, including one eos token per document."""
    documents: int
    """Number of documents; 0 if another tool's files do not record it."""
    text_bytes: int
    """UTF-8 bytes of the documents. Bits per byte are nats per token x tokens / text_bytes / ln 2. 0 for another tool's
    files, which have `ReadyMade.validation_bytes` instead."""
    exhausted: bool
    """True if the source ended before the requested number of tokens was reached."""
    position: Position
    """Place in the source after the last of these documents, at which a longer run continues."""
    shards: tuple[Shard, ...]


class ReadyMade(BaseModel, extra="forbid", frozen=True):
    """Facts about the token files of another tool that their headers lack."""

    kind: str
    has_eos: bool
    """True if the tokenizer's eos token occurs in the sample of training tokens that was checked."""
    validation_bytes: dict[int, int] = Field(default_factory=dict)
    """UTF-8 bytes of the text of the first N tokens of the validation split, by N."""


class Index(BaseModel, extra="forbid", frozen=True):
    """Schema of index.json."""

    format: Literal[2]
    source: str
    tokenizer: str
    vocab_size: int
    eos_id: int
    dtype: Literal["<u2", "<u4"]
    splits: dict[Split, SplitIndex]
    ready_made: ReadyMade | None = None
    """Given if the tokens are in files of another tool, outside of this folder."""


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
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.index.tokenizer, self.index.vocab_size)

    @property
    def eos_id(self) -> int:
        return self.index.eos_id

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.index.dtype)

    def tokens(self, split: Split) -> TokenShards:
        """Return all tokens of a split up to the recipe's limit. A shard is memory-mapped when it is read."""
        shards = [LazyShard(self.directory, shard) for shard in self.index.splits[split].shards]
        return TokenShards(shards, self.limits.get(split))

    def bytes_per_token(self, split: Split) -> float:
        """Return the mean number of UTF-8 bytes of text per token of a split. For another tool's files, it is known only for
        the validation tokens that the recipe asks for."""
        if self.index.ready_made is not None:
            assert split == "validation", split
            tokens = len(self.tokens(split))
            return self.index.ready_made.validation_bytes[tokens] / tokens
        return self.index.splits[split].text_bytes / self.index.splits[split].tokens

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer that produced the tokens. Needs no network. Raises DataError if it is damaged."""
        folder, remedy = self.directory / TOKENIZER, f"delete {self.directory} and prepare again"
        return read_tokenizer(
            folder, lambda why: DataError(f"{folder}: the tokenizer can't be read ({why}); {remedy}"), try_out=True
        )


def open_dataset(directory: Path | str, limits: Mapping[Split, int] | None = None) -> TokenDataset:
    """Open a prepared folder. Raises DataError if the index or a shard is missing, truncated or inconsistent."""
    directory = Path(directory)
    index = read_index(directory)
    for shard in itertools.chain.from_iterable(split.shards for split in index.splits.values()):
        check_shard(directory, index, shard)
    return TokenDataset(directory, index, limits or {})


def read_index(directory: Path) -> Index:
    """Return the index of a prepared folder. Raises DataError if it is missing or damaged."""
    remedy = f"delete {directory} and prepare again"
    try:
        index = Index.model_validate_json((directory / INDEX).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{directory / INDEX}: no such file; expected a folder made by prepare; {remedy}") from None
    except IsADirectoryError as error:
        raise DataError(f"{directory / INDEX}: can't be read ({error.strerror}); {remedy}") from None
    except OSError as error:
        raise unavailable(f"{directory / INDEX}: can't be read", error) from None
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "the file"
        raise DataError(f"{directory / INDEX}: {where}: {problem['msg']}; {remedy}") from None
    if missing := [split for split in SPLITS if split not in index.splits]:
        raise DataError(f"{directory / INDEX}: splits.{missing[0]}: missing; {remedy}")
    return index


def check_shard(directory: Path, index: Index, shard: Shard) -> None:
    """Raise DataError if the file of a shard is missing, can't be read, or has another size or header than the index states."""
    path, remedy = directory / shard.name, f"delete {directory} and prepare again"
    if not os.path.isfile(path):  # False also for a name that is too long
        raise DataError(f"{path}: no such file; expected {shard.bytes} bytes; {remedy}")
    try:
        if (size := path.stat().st_size) != shard.bytes:
            raise DataError(f"{path}: {size} bytes found, {shard.bytes} expected; {remedy}")
        if shard.offset is not None:  # its header was read when this index was written
            return
        array = np.load(path, mmap_mode="r")
        found = f"{array.dtype.str} {array.shape}"
    except OSError as error:
        raise unavailable(f"{path}: can't be read", error) from None
    except (ValueError, EOFError, SyntaxError, tokenize.TokenError) as error:  # NumPy parses the header as Python
        found = one_line(error)
    if found != (expected := f"{index.dtype} {(shard.tokens,)}"):
        raise DataError(f"{path}: another file's content ({found} found, {expected} expected); {remedy}")


def unavailable(what: str, error: Exception) -> UnavailableError:
    """Return the error of a file that could not be read, perhaps only temporarily. It is not shared, because other
    ranks read other shards or at another time."""
    found = UnavailableError(f"{what} ({one_line(error)}); start the same command again")
    found.is_shared = False
    return found
