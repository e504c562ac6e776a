"""Checks of token shards: all nodes have the same tokens, and none is damaged.

Sizes and headers are checked whenever a folder is opened. Checksums are compared once after each start, in a
background thread, because they need every byte. The ranks of a node divide the shards. A damaged shard ends the run.
"""

from __future__ import annotations

import hashlib
import socket
import threading
import time
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from llmtrain.data.index import INDEX, Index, Shard, TokenDataset
from llmtrain.data.sources import SPLITS
from llmtrain.errors import DataError
from llmtrain.parallel.mesh import Mesh

CHUNK_BYTES = 1 << 22


class ChecksumScan:
    """Checksum scan in a background thread. Starts when constructed and ends at the first damaged shard or after
    the last."""

    def __init__(self, texts: Iterable[TokenDataset], share: int = 0, of: int = 1):
        """Start reading every `of`-th shard of `texts`, beginning with shard number `share`."""
        self.problem: str | None = None
        """One-line description of the first damaged shard found, or None."""
        self._shards = [
            (text, shard) for text in texts for split in text.index.splits.values() for shard in split.shards
        ]
        self._shards = self._shards[share::of]
        # A daemon thread, so that a run that ends does not wait for it.
        self._thread = threading.Thread(target=self._run, name="reads token shards", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the scan ends."""
        self._thread.join()

    def _run(self) -> None:
        found = ((text, find_damage(text, shard)) for text, shard in self._shards)
        self.problem = next((one for text, one in found if one is not None and not _is_replaced(text)), None)


def find_damage(prepared: TokenDataset, shard: Shard) -> str | None:
    """Return a one-line description of a shard's damage, or None if it is as prepared."""
    path, host = prepared.directory / shard.name, socket.gethostname()
    remedy = f"delete {prepared.directory} and start the same command again: it prepares the same tokens"
    try:
        found = _crc32(path, skip=shard.bytes - shard.tokens * prepared.dtype.itemsize)
    except OSError as error:
        return f"{path} on {host}: can't be read ({error.strerror}); {remedy}"
    if found != shard.crc32:
        return f"{path} on {host}: checksum {found:08x} found, {shard.crc32:08x} expected; {remedy}"
    return None


def _is_replaced(prepared: TokenDataset) -> bool:
    """Return whether another run has replaced this folder with a larger one since it was opened, as `prepare` does."""
    for _ in range(2):
        with suppress(OSError, ValueError):
            return Index.model_validate_json((prepared.directory / INDEX).read_bytes()) != prepared.index
        time.sleep(1.0)  # there is no folder between the two renames of `prepare`
    return False


def verify(prepared: TokenDataset) -> None:
    """Read every shard and compare checksums. Raises a DataError that names the first damaged shard."""
    for split in prepared.index.splits.values():
        for shard in split.shards:
            if (problem := find_damage(prepared, shard)) is not None:
                raise DataError(problem)


def _crc32(path: Path, skip: int) -> int:
    """Return the CRC-32 of the bytes after the first `skip`. The file is read instead of memory-mapped, because a read
    that waits for the disk does not block other threads."""
    crc32, buffer = 0, memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(skip)
        while count := file.readinto(buffer):
            crc32 = zlib.crc32(buffer[:count], crc32)
    return crc32


STRETCHES, LENGTH = 64, 1024
"""Number of windows compared per split, and tokens per window."""


def check_same_tokens(mesh: Mesh, texts: Mapping[str, TokenDataset]) -> None:
    """Raise DataError on every rank if hosts would read different tokens or a rank cannot read its own. Tokens
    differ if the hub dataset, a local file or Python's standard library is not the same on all hosts. This is a
    collective of all ranks."""
    if mesh.world.size == 1:
        return
    mine = socket.gethostname(), *_described(texts)
    of_ranks = mesh.all_ranks.all_gather_object(mine, "comparing token shards")
    for rank, (host, _, problem) in enumerate(of_ranks):
        if problem is not None:
            raise DataError(f"rank {rank} on {host} can't read its token shards: {problem}; see to that disk")
    first_host, first, _ = of_ranks[0]
    for rank, (host, theirs, _) in enumerate(of_ranks):
        for name, text in theirs.items():
            if text != first[name]:
                raise DataError(
                    f"{texts[name].index.source}: rank {rank} on {host} has other tokens ({text}) than rank 0 on {first_host} "
                    f"({first[name]}); let all hosts see one data.cache_dir, or copy {texts[name].directory} from one to all"
                )


def _described(texts: Mapping[str, TokenDataset]) -> tuple[dict[str, str], str | None]:
    """Return (digest of each text, None), or (no digests, the error) if a text could not be read."""
    try:
        return {name: token_digest(text) for name, text in texts.items()}, None
    except OSError as error:
        return {}, str(error)


def token_digest(prepared: TokenDataset) -> str:
    """Return the token counts, the vocabulary size and a digest, as text. The digest covers vocabulary size, eos
    id, dtype and evenly spaced windows of every split."""
    counts = {split: prepared.tokens(split) for split in SPLITS}
    digest = hashlib.sha256(repr((prepared.vocab_size, prepared.eos_id, prepared.index.dtype)).encode())
    for tokens in counts.values():
        length = min(LENGTH, len(tokens))
        for start in np.linspace(0, len(tokens) - length, STRETCHES, dtype=np.int64):
            digest.update(tokens.window(int(start), length).astype("<u4").tobytes())
    sizes = " + ".join(f"{len(tokens):,}" for tokens in counts.values())
    return f"{sizes} of a vocabulary of {prepared.vocab_size:,}, {digest.hexdigest()[:8]}"
