"""Preparation of token shards on disk from text: done once, cached, continued after an interruption, and safe against
concurrent processes.

Each text has a folder in `data.cache_dir`. The folder is created in one rename, with its tokenizer and no tokens, and grows
under a lock. Its index names the shards that are complete. These never change, so that one run may read them while another
one adds more. Every document is tokenized without special tokens and followed by eos.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from filelock import Timeout

from llmtrain.config import DataSection
from llmtrain.config.data import HUB
from llmtrain.data.dataset import FORMAT, INDEX, TOKENIZER, Index, SplitIndex, TokenDataset, open_dataset
from llmtrain.data.extend import extend
from llmtrain.data.local_files import describe_skipped
from llmtrain.data.order import FIRST_BLOCK
from llmtrain.data.python_files import PYTHON, python_text
from llmtrain.data.ready_made import describe_files, find_ready_made, index_of, is_measured, measured
from llmtrain.data.sources import SPLITS, Position, Split, TextStream, fingerprint, source_keys, splits_of
from llmtrain.data.tokenizer import load_tokenizer, tokenizer_files, trained_size, vocab_size
from llmtrain.errors import DataError, data_error
from llmtrain.files import atomic_write, check_path
from llmtrain.waiting import acquire, announced

NO_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Error numbers of a disk that is full, over quota or read-only."""
PACKAGES = "packages.txt"
"""File that records the packages of `python`: versions, sizes and digests, one package per line."""
MANY = 20
"""Expected number of documents of a split above which an empty split can't be chance."""
BY_PARAGRAPHS = """'data.separator="\\n\\n"'"""
"""Override that makes each paragraph of a .txt a document, quoted for a shell."""
LOCK_SECONDS = 24 * 3600.0
"""Maximum seconds to wait for another process that prepares the same folder."""


def prepare(
    data: DataSection,
    train_tokens: int,
    eval_tokens: int,
    *,
    show_progress: bool = False,
    first_block_only: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> TokenDataset:
    """Return the token shards of `data`, from the cache or newly prepared.

    `train_tokens` and `eval_tokens` are the tokens that a run reads. The training split of a local source is
    tokenized completely, so that a short run still sees all kinds of documents; that of a hub dataset is tokenized
    only as far as the run reads it. `data.max_tokens`, if given, sets the number of training tokens in both cases.
    The validation split is tokenized only as far as the run reads it. A cached folder is reused if it has enough
    tokens, or all tokens of its source. Otherwise the missing ones are added; so is the rest of a preparation that was
    interrupted. If several processes start together, one prepares and the others wait for it. Raises DataError if the
    source, the tokenizer or the folder can't be used, or if a split has no documents.

    With `first_block_only`, only the first block of the training tokens is needed, because another process tokenizes the
    rest while a run reads the folder. That process passes `on_progress`, which is called with the number of training tokens and of
    documents skipped so far.
    """
    limits = tokens_to_prepare(data, train_tokens, eval_tokens)
    needed = {**limits, "train": min(limits["train"], FIRST_BLOCK + 1)} if first_block_only else limits
    directory = cache_path(data)
    try:
        cached = open_dataset(directory, limits)
    except DataError:  # missing or damaged; opened again under the lock, where damage is an error
        cached = None
    if cached is not None and _is_sufficient(cached, needed):
        _check_tokenizer(directory)
        return cached
    with _lock(directory, show_progress), _full_disk_as_data_error(directory):
        if not directory.exists():
            if not data.source.startswith(HUB) and find_ready_made(data) is None:
                check_documents(data)
            _create(directory, data)
        if show_progress and data.source == PYTHON:
            print(python_text().line(data.validation_fraction), flush=True)
        cached = open_dataset(directory, limits)
        _check_tokenizer(directory)
        if cached.index.ready_made is not None:
            cached = _measure(cached, show_progress)
        elif not _is_sufficient(cached, needed):
            if show_progress and (line := describe_skipped(data.source)) is not None:
                print(line, flush=True)
            extend(directory, cached.index, data, cached.load_tokenizer(), needed, show_progress, on_progress)
            cached = open_dataset(directory, limits)
            _check_prepared(cached, data)
    return cached


def tokens_to_prepare(data: DataSection, train_tokens: int, eval_tokens: int) -> dict[Split, int]:
    """Return the number of tokens of each split to prepare for a run that reads `train_tokens` and `eval_tokens`;
    `sys.maxsize` means all tokens of the source."""
    # one more than the run reads, because the last token is only a label
    whole = train_tokens + 1 if data.source.startswith(HUB) else sys.maxsize
    return {"train": data.max_tokens or whole, "validation": eval_tokens + 1}


def token_dtype(vocabulary: int) -> str:
    """Return the type in which shards store the tokens of a vocabulary of this size."""
    return "<u2" if vocabulary <= 1 << 16 else "<u4"


def _check_tokenizer(directory: Path) -> None:
    """Raise DataError if the folder has lost its tokenizer, without which its tokens can't be read."""
    config = directory / TOKENIZER / "tokenizer_config.json"
    if not config.is_file():
        raise DataError(
            f"{config}: no such file; the tokens can't be read without it; delete {directory} and prepare again"
        )


def cache_path(data: DataSection) -> Path:
    """Return the path of the cache folder of `data`. Its name has a readable part and a hash of everything that determines
    the tokens. Raises UserError if the path is too long or its parent may not be read, and DataError if the source or the
    tokenizer's files can't be read."""
    try:
        tokenizer = [hashlib.sha256(path.read_bytes()).hexdigest() for path in tokenizer_files(data.tokenizer)]
    except OSError as error:
        raise DataError(f"data.tokenizer: {error.filename}: can't be read ({error.strerror}); copy it again") from None
    keys = ("text_key", "separator", "validation_fraction")
    ready_made = find_ready_made(data)
    identity = {
        "format": FORMAT,
        "source": fingerprint(data) if ready_made is None else ready_made.stamps(),
        "tokenizer": tokenizer or data.tokenizer,
        **{key: getattr(data, key) for key in keys},
    }
    if ready_made is not None and ready_made.validation:
        identity["validation_files"] = len(ready_made.validation)  # the last N stamps are of these files
    sample = data.tokenizer_sample_bytes
    if trained_size(data.tokenizer) is not None and sample != DataSection().tokenizer_sample_bytes:
        identity["tokenizer_sample_bytes"] = sample
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    labels = (data.source.removeprefix(HUB), data.subset, data.tokenizer.replace(":", "_"))
    name = "-".join(Path(label).name.partition(".")[0] for label in labels if label)
    path = Path(data.cache_dir) / f"{re.sub(r'[^A-Za-z0-9_-]+', '_', name)[:100]}-{digest}"
    check_path(path)
    return path


def describe_kept(data: DataSection) -> str:
    """Return a text for the user about what an interrupted preparation has written to the cache folder of `data`."""
    directory = cache_path(data)
    try:
        splits = open_dataset(directory).index.splits
    except DataError:
        return "no tokens are written yet"
    counts = " and ".join(f"{splits[split].tokens:,} {split}" for split in SPLITS)
    return f"{directory} keeps {counts} tokens"


def _is_sufficient(cached: TokenDataset, needed: Mapping[Split, int]) -> bool:
    splits = cached.index.splits
    return is_measured(cached) and all(
        splits[split].exhausted or splits[split].tokens >= needed[split] for split in SPLITS
    )


def _measure(cached: TokenDataset, show_progress: bool) -> TokenDataset:
    """Add the number of text bytes of the validation tokens that the run reads to the index of ready-made tokens, and
    return the tokens."""
    if show_progress:
        print(*describe_files(cached), sep="\n", flush=True)
    if is_measured(cached):
        return cached
    index = measured(cached)
    atomic_write(cached.directory / INDEX, index.model_dump_json(indent=1))
    return TokenDataset(cached.directory, index, cached.limits)


@contextmanager
def _lock(directory: Path, say: bool) -> Iterator[None]:
    path = Path(f"{directory}.lock")

    def announce() -> None:
        if say:
            print(f"waiting for another process that prepares {directory} (lock {path})", flush=True)

    try:
        lock = acquire(path, LOCK_SECONDS, announce)
    except Timeout:
        raise DataError(
            f"{path}: another process has held this lock for {LOCK_SECONDS:g} s; wait for it or stop it"
        ) from None
    except OSError as error:
        problem = f"data.cache_dir: {directory.parent}: {error.strerror}; expected a folder to write in"
        raise data_error(problem, error) from None
    with lock:
        yield


@contextmanager
def _full_disk_as_data_error(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in NO_PLACE:
            raise
        problem = f"data.cache_dir: {directory}: {error.strerror}; make room, or choose another folder"
        raise data_error(problem, error) from None


def _create(directory: Path, data: DataSection) -> None:
    """Create the folder with its tokenizer, and with an index without tokens or of ready-made ones. The folder appears
    complete or not at all."""
    for leftover in directory.parent.glob(f"{directory.name}.*-tmp"):  # left by a process that was killed
        shutil.rmtree(leftover)
    new = directory.with_name(f"{directory.name}.new-tmp")
    new.mkdir()
    try:
        tokenizer = load_tokenizer(data, new / TOKENIZER)
        size = vocab_size(tokenizer)
        empty = SplitIndex(tokens=0, documents=0, text_bytes=0, exhausted=False, position=Position(), shards=())
        index = Index(
            format=FORMAT,
            source=data.source,
            tokenizer=data.tokenizer,
            vocab_size=size,
            eos_id=tokenizer.eos_token_id,
            dtype=token_dtype(size),
            splits=dict.fromkeys(SPLITS, empty),
        )
        if (files := find_ready_made(data)) is not None:
            index = index_of(files, data, index)
        (new / INDEX).write_text(index.model_dump_json(indent=1), encoding="utf-8")
        if data.source == PYTHON:
            (new / PACKAGES).write_text(python_text().record, encoding="utf-8")
        for path in (new / INDEX, *(new / TOKENIZER).rglob("*"), new / TOKENIZER, new):
            _fsync(path)
        new.rename(directory)
        _fsync(directory.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def check_documents(data: DataSection) -> None:
    """Raise DataError if a split of a local text has no documents, or if the text can't be read. The text is read only
    until each split has a document. The check comes before tokenization, which would otherwise be in vain."""
    for key in source_keys(data):
        found: Counter[Split] = Counter()
        with announced(f"the first documents of {data.source}"):
            for split, _ in TextStream(data, key):
                found[split] += 1
                if len(found) == len(splits_of(data, key)):
                    break
        for split in splits_of(data, key):
            if not found[split]:
                raise _no_documents(data, split, found.total())


def _check_prepared(prepared: TokenDataset, data: DataSection) -> None:
    """Delete the folder and raise DataError if the source has ended and a split has no documents."""
    for split, entry in prepared.index.splits.items():
        if entry.exhausted and not entry.documents:
            shutil.rmtree(prepared.directory)
            raise _no_documents(data, split, entry.position.documents)


def _no_documents(data: DataSection, split: Split, found: int) -> DataError:
    """Return the error of a source with `found` documents, none of which is for a split."""
    if data.validation is not None:
        key = "data.source" if split == "train" or data.validation == data.source else "data.validation"
        remedy = f"give another {key}, or more text"
    elif found == 1:
        return DataError(
            f"{data.source} is one document, so it leaves no text to train or to validate on; cut it with {BY_PARAGRAPHS} (a document "
            "per paragraph), or give data.validation=FILE"
        )
    elif found * (data.validation_fraction if split == "validation" else 1 - data.validation_fraction) > MANY:
        remedy = (
            f"the other split has all {found:,}, which therefore seem to be equal; equal documents are never divided"
        )
    else:
        cut = "" if data.separator != DataSection().separator else f" ({BY_PARAGRAPHS} cuts a .txt by paragraphs)"
        fraction = f"change data.validation_fraction (now {data.validation_fraction:g})"
        remedy = f"give more of them{cut}, {fraction}, or give data.validation=FILE"
    return DataError(f"{data.source}: no {split} documents; {remedy}")


def _fsync(path: Path) -> None:
    """Flush a file or a folder's entries to disk. Without it, a rename can reach the disk before the renamed
    content."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
