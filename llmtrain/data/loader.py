"""Training batches in an order set by the seed, read one step ahead, and a fixed set of validation batches.

Sample i is the window of sequence_length + 1 tokens that starts at token i x sequence_length. Its first
sequence_length tokens are the inputs, its last sequence_length tokens the labels. Documents are packed: a window
may contain the end of one and the start of the next, separated by eos. Nothing is padded, and tokens that do not
fill the last window are dropped. `document_loader` has the batches of documents that are not packed.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from llmtrain.data.batch_shape import BatchShape
from llmtrain.data.dataset import TokenShards
from llmtrain.data.order import SampleCursor, SampleOrder, block_of_sample, merge_cursors, resize
from llmtrain.data.tokens import Tokens
from llmtrain.errors import DataError, TrainingError
from llmtrain.loss import IGNORE_INDEX
from llmtrain.reshard import FromAllRanks, MeshChange
from llmtrain.threads import with_current_device
from llmtrain.waiting import QUIET_SECONDS

EXIT_WAIT_SECONDS = 2.0
"""Seconds that process exit waits for a read in flight. A read that hangs longer holds no tensors and is safe to
abandon."""


SamplesBefore = Callable[[str, int, Callable[[int], int]], int]
"""Function that returns the number of samples that a text had in a run of another length
(`LengthChange.samples_before`). Its arguments are the text's name, the text's number of samples now, and a function
that maps a number of the run's sequences to an upper bound on how many of them are from this text."""


class Loader:
    """Loader of this rank's part of the global batches.

    A step takes the next global_batch entries of the endless list of samples. Replica r reads the r-th part of them, and shard
    rank s the s-th equal part of that. After the number of replicas, their parts or the global batch change, the entries that the
    earlier replicas left unread come first (`merge_cursors`).
    """

    def __init__(self, tokens: Tokens, shape: BatchShape, *, in_blocks: bool = False) -> None:
        """Read `tokens` in batches of a shape. With `in_blocks`, they are `GrowingTokens`: the first epoch is shuffled in
        blocks, and the loader waits for each block. Raises DataError if the data is smaller than one global batch."""
        self.tokens, self.shape = tokens, shape
        self.sequence_length = shape.sequence_length
        self.global_batch, self.micro_batch = shape.global_batch, shape.micro_batch
        self.num_samples = self._count_samples()
        """Number of samples in the data; an upper bound while the length of the source is unknown."""
        self.cursor = SampleCursor()
        """Cursor at the entries that no replica has read, provided that all replicas have taken as many steps as
        this one."""
        if self.num_samples < self.global_batch:
            raise DataError(f"training data: {self._shortage()}")
        self.mean_replica_tokens = self.global_batch * self.sequence_length / shape.replicas
        """Tokens of the last step's global batch, divided by the number of replicas."""
        self.relative_part = shape.relative_part
        """Sequences that this replica reads per step, divided by the mean over all replicas."""
        self._in_blocks = in_blocks
        self.order = self._new_order()

    @property
    def attended_length(self) -> float:
        """Return the mean over all tokens of the length of a token's sequence, for the estimate of attention's work."""
        return self.sequence_length

    def next(self) -> list[torch.Tensor]:
        """Return this rank's micro-batches for the next step: int64 [micro_batch, sequence_length + 1] each."""
        if self._in_blocks:
            # All ranks wait here for the text of the complete step. Otherwise a rank that has its own part would wait in
            # a collective for a rank that does not.
            self.order.wait_for(max(part[-1] for part in self.cursor.peek(0, self.global_batch)))
        micro_batches = self._read(self._samples(self.shape.first, self.shape.per_rank))
        self.cursor.advance(self.global_batch)
        self.order.forget(self.cursor.lowest)
        return micro_batches

    def _samples(self, first: int, count: int) -> list[int]:
        """Return the `count` unread samples after the next `first` ones, and leave them unread."""
        return [self.order.sample(entry) for part in self.cursor.peek(first, count) for entry in part]

    def _count_samples(self) -> int:
        return max(self.tokens.max_tokens - 1, 0) // self.sequence_length

    def _shortage(self) -> str:
        """Return the text of an error about data with fewer samples than one step needs."""
        return (
            f"{len(self.tokens)} tokens, but one step of {self.global_batch} sequences of {self.sequence_length} needs "
            f"{self.global_batch * self.sequence_length + 1}; give more text (data.source, data.max_tokens), "
            "or lower train.global_batch or train.sequence_length"
        )

    def _read(self, samples: Sequence[int]) -> list[torch.Tensor]:
        """Return this rank's part of a step as micro-batches."""
        length = self.sequence_length
        rows = np.empty((len(samples), length + 1), dtype=np.int64)
        for row, sample in zip(rows, samples, strict=True):  # a window is a view, which keeps a file open
            row[:] = self.tokens.window(sample * length, length + 1)
        return list(torch.from_numpy(rows).split(self.micro_batch))

    def state_dict(self) -> dict[str, Any]:
        return self.cursor.state_dict() | self.order.state_dict() | self.shape.state_dict()

    def reshard_rule(self) -> FromAllRanks:
        """Return the rule by which `state_dict` is resharded: each sample that no replica has read is read once."""
        return FromAllRanks(self._reshard)

    def _reshard(self, change: MeshChange, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
        states = ranks[:: change.old_shards]
        if not change.replicas_changed and change.old_global_batch is None and self.shape.has_parts_of(states):
            return states[change.replica]
        return self._merge(states, change.old_global_batch or self.global_batch)

    def _merge(self, states: Sequence[dict[str, Any]], global_batch: int) -> dict[str, Any]:
        """Return the state from which all replicas continue, given the state of each earlier replica and their global batch."""
        return merge_cursors(states, global_batch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor.load_state_dict(state)
        self.order = self._new_order(state.get("sizes", ()))

    def state_for_length(self, state: dict[str, Any], before: SamplesBefore) -> dict[str, Any]:
        """Return the `state` of a run of another length as a state of this run. `before` returns how many samples a text had in
        that run."""
        return resize(state, before("", self.num_samples, lambda entries: entries), self.num_samples)

    def read_by_text(self, states: Sequence[dict[str, Any]]) -> dict[str, int]:
        """Return the number of sequences that a run has read of each text, by the text's name. `states` has the loader's
        state of each replica. The result is empty if the run has one text."""
        return {}

    def _new_order(self, sizes: Sequence[int] = ()) -> SampleOrder:
        if not self._in_blocks:
            return SampleOrder(self.num_samples, self.shape.seed, sizes)
        block = partial(block_of_sample, sequence_length=self.sequence_length)
        return SampleOrder(self.num_samples, self.shape.seed, sizes, block=block, wait=self._wait_for_samples)

    def _wait_for_samples(self, samples: int) -> int:
        """Wait until `samples` samples exist or the source has ended. Return how many exist. Raises DataError if they are
        fewer than one global batch."""
        existing = max(self.tokens.wait_for(samples * self.sequence_length + 1) - 1, 0) // self.sequence_length
        if existing < min(samples, self.global_batch):
            raise DataError(f"training data: {self._shortage()}")
        return existing


class PrefetchLoader:
    """Loader wrapper that reads one step ahead in a background thread, so that training does not wait for a disk that is
    slow at times. Its state excludes the batches read ahead.

    With `pin`, batches are in pinned memory, so that a GPU can copy them while it computes.
    """

    def __init__(self, loader: Loader, timeout_seconds: float, pin: bool = False):
        self.loader, self._timeout, self._pin = loader, timeout_seconds, pin
        self._requests: SimpleQueue[None] = SimpleQueue()
        self._results: SimpleQueue[list[torch.Tensor] | BaseException] = SimpleQueue()
        self._is_reading = False  # True from a request until its result is received
        self._state = loader.state_dict()  # excludes the batches read ahead
        self.mean_replica_tokens = loader.mean_replica_tokens
        """Tokens of the last global batch of which `next` has returned a part, divided by the number of replicas."""
        self.relative_part = loader.relative_part
        """Sequences that this replica reads per step, divided by the mean over all replicas."""
        # A daemon thread, because a hung disk must not keep the process alive after the run has given up on it.
        threading.Thread(target=with_current_device(self._worker), name="reads ahead", daemon=True).start()
        atexit.register(self._drain)

    def next(self) -> list[torch.Tensor]:
        """Return this rank's micro-batches for the next step, as the loader does. Raises TrainingError if they do not arrive
        within `timeout_seconds`."""
        if not self._is_reading:
            self._request()
        batches = self._receive()
        self._state, self.mean_replica_tokens = self.loader.state_dict(), self.loader.mean_replica_tokens
        self._request()
        return batches

    @property
    def num_samples(self) -> int:
        """Return the number of samples in the data."""
        return self.loader.num_samples

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last batches that `next` returned."""
        return self._state

    def reshard_rule(self) -> FromAllRanks:
        """Return the rule by which `state_dict` is resharded."""
        return self.loader.reshard_rule()

    def state_for_length(self, state: dict[str, Any], before: SamplesBefore) -> dict[str, Any]:
        """Return the `state` of a run of another length as a state of this run."""
        return self.loader.state_for_length(state, before)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, after discarding batches read ahead."""
        if self._is_reading:
            self._receive()
        self.loader.load_state_dict(state)
        self._state = self.loader.state_dict()

    def _drain(self) -> None:
        """Wait at process exit for a read in flight, because the interpreter crashes if it ends while a thread uses
        tensors."""
        if self._is_reading:
            with suppress(Empty):
                self._results.get(timeout=EXIT_WAIT_SECONDS)

    def _request(self) -> None:
        self._is_reading = True
        self._requests.put(None)

    def _get(self, seconds: float) -> list[torch.Tensor] | BaseException | None:
        """Return the batches read, or the error of reading them; None if nothing arrives within `seconds`. Time spent
        waiting for text to be tokenized does not count, because that wait announces itself and has a limit of its own."""
        while True:
            try:
                return self._results.get(timeout=seconds)
            except Empty:
                if not self.loader.tokens.is_waiting(seconds):
                    return None

    def _receive(self) -> list[torch.Tensor]:
        quiet = min(QUIET_SECONDS, self._timeout)
        if (batches := self._get(quiet)) is None:
            print(
                f"waiting for the disk with the token shards (at most {self._timeout:g} s)", file=sys.stderr, flush=True
            )
            batches = self._get(self._timeout - quiet)
        if batches is None:
            raise TrainingError(  # not a DataError: only this rank is affected, and a new start may succeed
                f"no batch could be read in {self._timeout:g} s (run.timeout_seconds): the disk that holds the token shards does "
                "not answer; start the same command again when it does, to continue from the last checkpoint"
            )
        self._is_reading = False
        if isinstance(batches, BaseException):
            raise batches
        return batches

    def _worker(self) -> None:
        """Serve read requests until the process exits. The thread never ends earlier, because one that ends during
        interpreter shutdown would free tensors and crash the interpreter."""
        while True:
            self._requests.get()
            try:
                batches = self.loader.next()
                self._results.put([batch.pin_memory() for batch in batches] if self._pin else batches)
            except BaseException as error:  # the training thread raises it
                self._results.put(error)


def eval_batches(
    tokens: TokenShards, *, max_tokens: int, sequence_length: int, micro_batch: int, rank: int, world: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return an iterator over this rank's validation batches: (input_ids, labels), each int64
    [micro_batch, sequence_length].

    The first max_tokens // sequence_length windows (at least one, at most all) are assigned to the ranks in turn.
    Every rank yields the same number of batches, all of the same shape. Labels of rows without a window are
    IGNORE_INDEX. Raises DataError if the data has no complete window.
    """
    windows = count_windows(tokens, max_tokens, sequence_length)
    per_batch = world * micro_batch
    return (
        _eval_batch(tokens, range(first + rank, min(first + per_batch, windows), world), sequence_length, micro_batch)
        for first in range(0, windows, per_batch)
    )


def count_windows(tokens: TokenShards, max_tokens: int, sequence_length: int) -> int:
    """Return the number of windows that are validated. Raises DataError if the data has no complete window."""
    existing = max(len(tokens) - 1, 0) // sequence_length
    if not existing:
        raise DataError(
            f"validation data: {len(tokens)} tokens, but one sequence needs {sequence_length + 1}; raise "
            "data.validation_fraction, give data.validation, or lower train.sequence_length"
        )
    return min(max(max_tokens // sequence_length, 1), existing)


def _eval_batch(
    tokens: TokenShards, windows: range, sequence_length: int, micro_batch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.zeros(micro_batch, sequence_length, dtype=torch.int64)
    labels = torch.full_like(inputs, IGNORE_INDEX)
    for row, window in enumerate(windows):
        ids = torch.from_numpy(tokens.window(window * sequence_length, sequence_length + 1).astype(np.int64))
        inputs[row], labels[row] = ids[:-1], ids[1:]
    return inputs, labels
