"""Preparation of token shards on disk from text: done once, cached, and safe against interruption and concurrent
processes.

A folder of `data.cache_dir` appears complete or not at all. Its files are written under a lock to a temporary
folder next to it and flushed to disk, and then the folder is renamed. Every document is tokenized without special
tokens and followed by eos.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from filelock import FileLock, Timeout

from llmtrain.config import DataSection
from llmtrain.data.index import (
    FORMAT,
    INDEX,
    TOKENIZER,
    Index,
    ShardWriter,
    SplitIndex,
    TokenDataset,
    fsync_and_close,
    open_dataset,
)
from llmtrain.data.progress_bar import ProgressBar
from llmtrain.data.sources import HUB, SPLITS, Split, documents, fingerprint
from llmtrain.data.tokenizer import load_tokenizer, tokenizer_files, vocab_size
from llmtrain.data.verify import verify
from llmtrain.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

    Encoded = list[int] | Encoding

__all__ = ["TokenDataset", "cache_path", "open_dataset", "prepare", "verify"]

NO_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Error numbers of a disk that is full, over quota or read-only."""
BATCH_CHARACTERS = 1_000_000
"""Characters tokenized per batch. A batch is spread over the cores."""
PIECE_CHARACTERS = 1_000_000
"""Maximum characters per piece. Longer documents are tokenized in pieces, to bound memory."""


def prepare(
    data: DataSection,
    train_tokens: int,
    eval_tokens: int,
    *,
    show_progress: bool = False,
    lock_timeout: float = 24 * 3600,
) -> TokenDataset:
    """Return the token shards of `data`, from the cache or newly prepared.

    `train_tokens` and `eval_tokens` are the tokens that a run reads. The training split of a local source is
    tokenized completely, so that a short run still sees all kinds of documents; that of a hub dataset is tokenized
    only as far as the run reads it. `data.max_tokens`, if given, sets the number of training tokens in both cases.
    The validation split is tokenized only as far as the run reads it. A cached folder is reused if it has enough
    tokens or its source had no more; otherwise a larger one replaces it. If several processes start together, one
    prepares and the others wait for it for up to `lock_timeout` seconds. Raises DataError.
    """
    # one more than the run reads, because the last token is only a label
    whole = train_tokens + 1 if data.source.startswith(HUB) else sys.maxsize
    needed: dict[Split, int] = {"train": data.max_tokens or whole, "validation": eval_tokens + 1}
    directory = cache_path(data)
    try:
        cached = open_dataset(directory, needed)
    except DataError:  # absent, or being replaced; checked again under the lock
        cached = None
    if cached is not None and _is_sufficient(cached, needed):
        return cached
    with _lock(directory, lock_timeout, show_progress):
        cached = open_dataset(directory, needed) if directory.exists() else None
        if cached is None or not _is_sufficient(cached, needed):
            with _full_disk_as_data_error(directory):
                _replace(directory, data, needed, cached, show_progress)
    return open_dataset(directory, needed)


def cache_path(data: DataSection) -> Path:
    """Return the cache folder of `data`: a readable name and a hash of everything that determines the tokens."""
    tokenizer = [hashlib.sha256(path.read_bytes()).hexdigest() for path in tokenizer_files(data.tokenizer)]
    keys = ("text_key", "separator", "validation_fraction")
    identity = {
        "format": FORMAT,
        "source": fingerprint(data),
        "tokenizer": tokenizer or data.tokenizer,
        **{key: getattr(data, key) for key in keys},
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    labels = (data.source.removeprefix(HUB), data.subset, data.tokenizer.replace(":", "_"))
    name = "-".join(Path(label).name.partition(".")[0] for label in labels if label)
    return Path(data.cache_dir) / f"{re.sub(r'[^A-Za-z0-9_-]+', '_', name)}-{digest}"


def _is_sufficient(cached: TokenDataset, needed: Mapping[Split, int]) -> bool:
    splits = cached.index.splits
    return all(splits[split].exhausted or splits[split].tokens >= needed[split] for split in SPLITS)


@contextmanager
def _lock(directory: Path, timeout: float, say: bool) -> Iterator[None]:
    lock = FileLock(f"{directory}.lock")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if say:
                print(f"waiting for another process that prepares {directory} (lock {lock.lock_file})", flush=True)
            lock.acquire(timeout=timeout)
    except Timeout:
        raise DataError(
            f"{lock.lock_file}: another process has held this lock for {timeout:g} s; wait for it or stop it"
        ) from None
    except OSError as error:
        raise DataError(
            f"data.cache_dir: {directory.parent}: {error.strerror}; expected a folder to write in"
        ) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _full_disk_as_data_error(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in NO_PLACE:
            raise
        raise DataError(f"data.cache_dir: {directory}: {error.strerror}; make room, or choose another folder") from None


def _replace(
    directory: Path,
    data: DataSection,
    needed: Mapping[Split, int],
    old: TokenDataset | None,
    show_progress: bool,
) -> None:
    """Write the folder, or replace it with a larger one. The caller must hold the lock."""
    for leftover in directory.parent.glob(f"{directory.name}.*-tmp"):  # left by a process that was killed
        shutil.rmtree(leftover)
    new, retired = (directory.with_name(f"{directory.name}.{word}-tmp") for word in ("new", "old"))
    new.mkdir()
    try:
        if old is not None:
            shutil.copytree(directory / TOKENIZER, new / TOKENIZER)
            needed = {split: max(needed[split], old.index.splits[split].tokens) for split in SPLITS}
        _write(new, data, needed, show_progress)
        if old is not None:
            directory.rename(retired)
        new.rename(directory)
        _fsync(directory.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(retired, ignore_errors=True)


def _write(new: Path, data: DataSection, needed: Mapping[Split, int], show_progress: bool) -> None:
    tokenizer = load_tokenizer(data, new / TOKENIZER)
    size = vocab_size(tokenizer)
    dtype = np.dtype("<u2" if size <= 1 << 16 else "<u4")
    # validation first, because it is prepared quickly and its absence should be reported early
    splits = {
        split: _write_split(new, data, split, needed[split], tokenizer, dtype, show_progress)
        for split in reversed(SPLITS)
    }
    index = Index(
        format=FORMAT,
        source=data.source,
        tokenizer=data.tokenizer,
        vocab_size=size,
        eos_id=tokenizer.eos_token_id,
        dtype=dtype.str,
        splits=splits,
    )
    with (new / INDEX).open("wb") as file:
        file.write(index.model_dump_json(indent=1).encode())
        fsync_and_close(file)
    for path in (*(new / TOKENIZER).rglob("*"), new / TOKENIZER, new):
        _fsync(path)


def _write_split(
    new: Path,
    data: DataSection,
    split: Split,
    needed: int,
    tokenizer: PreTrainedTokenizerBase,
    dtype: np.dtype,
    show_progress: bool,
) -> SplitIndex:
    writer = ShardWriter(new, split, dtype)
    count, exhausted = 0, True
    with ProgressBar(f"{split} tokens", needed, show_progress) as progress, ThreadPoolExecutor(1) as pool:
        writing: Future | None = None
        # a split that needs little must not wait for a full batch from a stream that is mostly the other split
        for texts in _batches(documents(data, split), min(BATCH_CHARACTERS, 6 * needed)):
            encoded = _tokenize(tokenizer, texts)
            if writing is not None:
                writing.result()
            # one thread writes while all cores tokenize the next batch
            writing = pool.submit(_append, writer, encoded, tokenizer.eos_token_id)
            count += len(texts)
            tokens = sum(len(piece) + is_last for piece, is_last in encoded)
            progress.advance(sum(len(text.encode()) for text in texts), tokens)
            if progress.tokens >= needed:
                exhausted = False
                break
        if writing is not None:
            writing.result()
    writer.close()
    if not count:
        raise DataError(
            f"{data.source}: no {split} documents; give more of them (data.separator={data.separator!r} cuts a .txt), "
            f"change data.validation_fraction (now {data.validation_fraction:g}), or data.validation"
        )
    return SplitIndex(
        tokens=progress.tokens,
        documents=count,
        text_bytes=progress.text_bytes,
        exhausted=exhausted,
        shards=tuple(writer.shards),
    )


def _batches(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= size:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[tuple[Encoded, bool]]:
    """Return the token ids of the texts' pieces, in order, and whether each piece ends its text."""
    # tokenizers spreads a batch over the cores; setting this also silences its warning in processes that fork later
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    pieces = [
        (text[start : start + PIECE_CHARACTERS], start + PIECE_CHARACTERS >= len(text))
        for text in texts
        for start in range(0, len(text), PIECE_CHARACTERS)
    ]
    encoded = _encode(tokenizer, [piece for piece, _ in pieces])
    return [(ids, is_last) for ids, (_, is_last) in zip(encoded, pieces, strict=True)]


def _encode(tokenizer: PreTrainedTokenizerBase, pieces: list[str]) -> Sequence[Encoded]:
    """Encode pieces of text. An eos token quoted in a document is encoded as ordinary text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        options = {"add_special_tokens": False, "split_special_tokens": True, "return_attention_mask": False}
        return tokenizer(pieces, verbose=False, **options)["input_ids"]
    # Same ids without transformers' single-threaded work on offsets, which takes a third of the time on two cores.
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    return backend.encode_batch_fast(pieces, add_special_tokens=False)


def _append(writer: ShardWriter, encoded: list[tuple[Encoded, bool]], eos: int) -> None:
    """Write the ids of all pieces, with eos after each text."""
    end = np.array([eos], dtype=np.uint32)
    parts = (
        (np.array(ids if isinstance(ids, list) else ids.ids, dtype=np.uint32), end[: int(is_last)])
        for ids, is_last in encoded
    )
    writer.append(np.concatenate(list(itertools.chain.from_iterable(parts))))


def _fsync(path: Path) -> None:
    """Flush a file or a folder's entries to disk. Without it, a rename can reach the disk before the renamed
    content."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
