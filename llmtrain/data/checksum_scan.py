"""Search for damaged token shards in the background, while a run trains. The ranks of a node share the shards."""

from __future__ import annotations

import socket
import threading
import zlib
from collections.abc import Iterable
from pathlib import Path

from llmtrain.data.dataset import Shard, TokenDataset, unavailable
from llmtrain.errors import DataError


class ChecksumScan:
    """Scan of token shards for damage, in a background thread because it reads every byte. It starts when constructed, and
    ends after the first damaged shard or after the last shard. The run ends if a shard is damaged."""

    def __init__(self, texts: Iterable[TokenDataset], share: int, of: int):
        """Start to read every `of`-th shard of `texts`, beginning with shard number `share` (from 0)."""
        self.problem: DataError | None = None
        """Error of the first shard that is damaged or can't be read, or None."""
        shards = [(text, shard) for text in texts for split in text.index.splits.values() for shard in split.shards]
        self._shards = shards[share::of]
        # A daemon thread, so that a run that ends does not wait for it.
        self._thread = threading.Thread(target=self._run, name="reads token shards", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        found = (_find_damage(text, shard) for text, shard in self._shards)
        self.problem = next((problem for problem in found if problem is not None), None)


def _find_damage(prepared: TokenDataset, shard: Shard) -> DataError | None:
    """Return the error of a shard that is damaged or can't be read, or None if it is intact. Another tool's file has no
    checksum, and counts as damaged if it has a token id outside the vocabulary."""
    path, host, problem = prepared.directory / shard.name, socket.gethostname(), None
    remedy = f"delete {prepared.directory} and start the same command again: it prepares the same tokens"
    try:
        if shard.offset is not None:
            remedy, dtype = "copy it again", shard.dtype or prepared.index.dtype
            wrong = prepared.vocabulary.find_wrong(path, dtype, shard.offset, shard.tokens)
            problem = None if wrong is None else f"{wrong} (on {host})"
        elif (found := _crc32(path, skip=shard.bytes - shard.tokens * prepared.dtype.itemsize)) != shard.crc32:
            problem = f"{path} on {host}: checksum {found:08x} found, {shard.crc32:08x} expected; {remedy}"
    except FileNotFoundError as error:
        problem = f"{path} on {host}: can't be read ({error.strerror}); {remedy}"
    except OSError as error:
        return unavailable(f"{path} on {host}: can't be read", error)
    return None if problem is None else DataError(problem)


def _crc32(path: Path, skip: int) -> int:
    """Return the CRC-32 of the bytes after the first `skip`. The file is read and not memory-mapped, because a thread that
    waits for the disk in a read does not block other threads."""
    crc32, buffer = 0, memoryview(bytearray(1 << 22))
    with path.open("rb", buffering=0) as file:
        file.seek(skip)
        while count := file.readinto(buffer):
            crc32 = zlib.crc32(buffer[:count], crc32)
    return crc32
