"""Tokenizing of batches of text, in this process or in several, with results in the order of the batches.

One process reads the text, because reading takes at most a fifteenth of the time of tokenizing. Other processes
(`data.num_proc`) tokenize complete batches. Without other processes, the reading process also tokenizes. It then uses all
cores, too, through the threads of the tokenizers library, but it alternates between reading and tokenizing, waits for the
longest document of each batch, and converts all ids in one thread.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np

from llmtrain.data.sources import Split
from llmtrain.errors import DataError, UnavailableError, panics_as_errors, reason
from llmtrain.process_limits import usable_cores

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

    Encoded = list[int] | np.ndarray | Encoding

PIECE_CHARACTERS = 1_000_000
"""Maximum characters per piece. Longer documents are tokenized in pieces, to bound memory."""
PIECES_AT_ONCE = 8
"""Full pieces that are tokenized at the same time. Until their ids are copied, they take about 27 bytes per character (measured
on 16 MB of English with vocabularies of 2,048 and 50,257)."""
FIRST_BATCHES = 16
"""Number of batches that this process always tokenizes itself, so that a small text does not wait for processes to start."""
CORES_PER_PROCESS = 4
"""Cores per process if `data.num_proc` is null."""
QUEUED = 2
"""Limit on the pending batches per process: batches that were submitted and are not yielded yet."""

Batch = list[tuple[Split, str]]
Group = list[tuple[Split, str, bool]]
"""(Split, piece of a text, whether the text ends with the piece) for each of the pieces that are tokenized at the same time."""
Place = TypeVar("Place")


@dataclass(frozen=True)
class Part:
    """Tokens that a batch adds to a split."""

    pieces: list[tuple[Encoded, bool]] = field(default_factory=list)
    """(Token ids, whether eos follows) of each piece of a text, in order."""
    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0

    def ids(self, eos_id: int) -> np.ndarray:
        """Return all token ids, as uint32."""
        end = np.array([eos_id], dtype=np.uint32)
        arrays = [np.empty(0, dtype=np.uint32)]
        for encoded, is_last in self.pieces:
            arrays += [_as_array(encoded), end[: int(is_last)]]
        return np.concatenate(arrays)


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Batch) -> dict[Split, Part]:
    """Return the tokens that a batch adds to each split. Raises DataError if the tokenizer fails."""
    # tokenizers spreads a batch over the cores; setting this also silences its warning in processes that fork later
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    parts: dict[Split, Part] = {}
    for pieces in groups(texts):
        for ids, (split, piece, is_last) in zip(_encode_group(tokenizer, pieces), pieces, strict=True):
            part = parts.get(split, Part())
            part.pieces.append((ids, is_last))
            parts[split] = replace(
                part,
                tokens=part.tokens + len(ids) + is_last,
                documents=part.documents + is_last,
                text_bytes=part.text_bytes + len(piece.encode()),
            )
    return parts


def groups(texts: Iterable[tuple[Split, str]]) -> Iterator[Group]:
    """Yield the pieces of all texts in order, in groups. A group is complete once it is as long as PIECES_AT_ONCE full pieces."""
    group: Group = []
    characters = 0
    for split, text in texts:
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            group.append((split, piece, start + PIECE_CHARACTERS >= len(text)))
            characters += len(piece)
            if characters >= PIECES_AT_ONCE * PIECE_CHARACTERS:
                yield group
                group, characters = [], 0
    if group:
        yield group


def _encode_group(tokenizer: PreTrainedTokenizerBase, pieces: Group) -> list[Encoded]:
    """Return the ids of each piece. The last piece of a document is converted to an array later, in the thread that writes it."""
    try:
        with panics_as_errors():
            encoded = encode(tokenizer, [piece for _, piece, _ in pieces])
    except Exception as error:  # tokenizers raises plain Exceptions
        raise DataError(f"data.tokenizer: it can't tokenize a part of the text ({reason(error)})") from error
    return [ids if is_last else _as_array(ids) for ids, (_, _, is_last) in zip(encoded, pieces, strict=True)]


def _as_array(encoded: Encoded) -> np.ndarray:
    return np.asarray(encoded if isinstance(encoded, list | np.ndarray) else encoded.ids, dtype=np.uint32)


def encode(tokenizer: PreTrainedTokenizerBase, pieces: list[str]) -> Sequence[Encoded]:
    """Encode pieces of text. An eos token quoted in a document is encoded as ordinary text."""
    backend = _plain_backend(tokenizer)
    if backend is None:
        return _encode_slowly(tokenizer, pieces)
    # This returns the same ids without transformers' single-threaded work on offsets, a third of the time on two cores.
    return backend.encode_batch_fast(pieces, add_special_tokens=False)


def encode_without_threads(tokenizer: PreTrainedTokenizerBase, pieces: list[str]) -> list[list[int]]:
    """Return the ids of short pieces of text as `encode` does, but start no threads, which a process that forks must not have."""
    backend = _plain_backend(tokenizer)
    if backend is None:
        return _encode_slowly(tokenizer, pieces)
    return [backend.encode(piece, add_special_tokens=False).ids for piece in pieces]


def _plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """Return a tokenizer's fast part, set to encode complete texts without special tokens, or None if it has no such part."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
    return backend


def _encode_slowly(tokenizer: PreTrainedTokenizerBase, pieces: list[str]) -> list[list[int]]:
    options = {"add_special_tokens": False, "split_special_tokens": True, "return_attention_mask": False}
    return tokenizer(pieces, verbose=False, **options)["input_ids"]


def processes_of(num_proc: int | None) -> int:
    """Return the number of processes that tokenize on this machine for a value of `data.num_proc`."""
    return num_proc or max(1, usable_cores() // CORES_PER_PROCESS)


class BatchTokenizer:
    """Tokenizer of batches, in `processes` processes if there is more than one. Use it as a context manager."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_id: int, processes: int) -> None:
        self._tokenizer, self._eos_id, self._processes = tokenizer, eos_id, processes
        self._pool: ProcessPoolExecutor | None = None
        self._batches = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def in_order(self, batches: Iterable[tuple[Batch, Place]]) -> Iterator[tuple[dict[Split, Part], Place]]:
        """Yield (tokens, place) of each (batch, place), in order. If the iteration over `batches` raises a DataError, the
        tokens of earlier batches are yielded before it is raised. Also raises DataError if a process ends early or fails; that
        batch and later ones are then not yielded."""
        waiting: deque[tuple[Future[dict[Split, Part]], Place]] = deque()
        try:
            for batch, place in batches:
                waiting.append((self._submit(batch), place))
                while waiting and (len(waiting) >= QUEUED * self._processes or waiting[0][0].done()):
                    yield self._next(waiting)
        except DataError:  # of the source; text that was read before it is not lost
            while waiting:
                yield self._next(waiting)
            raise
        while waiting:
            yield self._next(waiting)

    def _next(self, waiting: deque[tuple[Future[dict[Split, Part]], Place]]) -> tuple[dict[Split, Part], Place]:
        """Return the first pending batch and remove it. A batch that failed stays the first one, so that no later
        one is returned."""
        found = self._result(waiting[0])
        waiting.popleft()
        return found

    def _submit(self, batch: Batch) -> Future[dict[Split, Part]]:
        self._batches += 1
        if self._processes == 1 or self._batches <= FIRST_BATCHES:
            done: Future[dict[Split, Part]] = Future()
            done.set_result(tokenize(self._tokenizer, batch))
            return done
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._processes,
                multiprocessing.get_context("spawn"),
                _begin,
                (self._tokenizer, self._eos_id, max(1, usable_cores() // self._processes)),
            )
        try:
            return self._pool.submit(_tokenize_here, batch)
        except BrokenProcessPool:
            raise self._ended() from None

    def _result(self, found: tuple[Future[dict[Split, Part]], Place]) -> tuple[dict[Split, Part], Place]:
        future, place = found
        try:
            return future.result(), place
        except BrokenProcessPool:
            raise self._ended() from None

    def _ended(self) -> UnavailableError:
        return UnavailableError(
            f"data.num_proc={self._processes}: a process that tokenizes was killed, or could not start; start the same command "
            "again, with a smaller data.num_proc if memory is short"
        )


_here: tuple[PreTrainedTokenizerBase, int]
"""(Tokenizer, id of its eos token) in a process of the pool."""


def _begin(tokenizer: PreTrainedTokenizerBase, eos_id: int, threads: int) -> None:
    """Prepare a process of the pool. It ends when its parent ends, even if the parent is killed."""
    global _here
    _here = tokenizer, eos_id
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    for number in (signal.SIGINT, signal.SIGUSR1):  # Ctrl-C and Slurm's signal are for the process that reads
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _tokenize_here(batch: Batch) -> dict[Split, Part]:
    tokenizer, eos_id = _here
    parts = tokenize(tokenizer, batch).items()
    return {split: replace(part, pieces=[(part.ids(eos_id), False)]) for split, part in parts}
