"""Training batches in an order set by the seed, read one step ahead, and a fixed set of validation batches.

Sample i is the window of sequence_length + 1 tokens that starts at token i x sequence_length. Its first
sequence_length tokens are the inputs, its last sequence_length tokens the labels. Documents are packed: a window
may contain the end of one and the start of the next, separated by eos. Nothing is padded, and tokens that do not
fill the last window are dropped.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from llmtrain.data.dataset import TokenShards
from llmtrain.errors import DataError
from llmtrain.loss import IGNORE_INDEX
from llmtrain.reshard import Rule, by_replica
from llmtrain.threads import with_current_device
from llmtrain.waiting import QUIET_SECONDS

REST_SECONDS = 2.0
"""Seconds that process exit waits for a read in flight. A read that hangs longer holds no tensors and is safe to
abandon."""


class SampleCursor:
    """Cursor over the endless list of samples. The unread entries are those of `left`, then all from `position` on."""

    def __init__(self, position: int = 0, left: Sequence[range] = ()):
        self.position, self.left = position, list(left)

    @property
    def num_read(self) -> int:
        """Return the number of entries read so far."""
        return self.position - sum(map(len, self.left))

    @property
    def lowest(self) -> int:
        """Return the lowest unread entry."""
        return min([self.position, *(part.start for part in self.left)])

    def peek(self, first: int, count: int) -> list[range]:
        """Return the `count` unread entries after the next `first` ones as ranges, in order."""
        found = []
        for upcoming in (*self.left, range(self.position, self.position + first + count)):
            here = upcoming[first : first + count]
            first, count = max(0, first - len(upcoming)), count - len(here)
            if here:
                found.append(here)
        return found

    def advance(self, count: int) -> None:
        """Mark the next `count` entries as read."""
        rest = []
        for part in self.left:
            used = min(count, len(part))
            count -= used
            if used < len(part):
                rest.append(part[used:])
        self.left, self.position = rest, self.position + count

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-serializable values."""
        leftover = {"left": [[part.start, part.stop] for part in self.left]} if self.left else {}
        return {"position": self.position, **leftover}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.left = state["position"], [range(*part) for part in state.get("left", [])]


def merge_cursors(states: Sequence[dict[str, Any]], global_batch: int) -> dict[str, Any]:
    """Return the state from which every replica of a continued run starts, given the state of each earlier replica.
    Each entry that no replica has read occurs exactly once in it. `global_batch` is the number of entries that all
    replicas together read per step, in equal parts."""
    replicas = [SampleCursor() for _ in states]
    for replica, state in zip(replicas, states, strict=True):
        replica.load_state_dict(state)
    ahead, share = max(replica.num_read for replica in replicas), global_batch // len(replicas)
    left = []
    for number, replica in enumerate(replicas):
        while replica.num_read < ahead:
            left += replica.peek(number * share, share)
            replica.advance(global_batch)
    first, sizes = replicas[0], {"sizes": states[0]["sizes"]} if "sizes" in states[0] else {}
    return SampleCursor(first.position, _joined([*left, *first.left])).state_dict() | sizes


def grow(state: dict[str, Any], before: int, now: int) -> dict[str, Any]:
    """Return a loader's state for data that had `before` samples, or its state's `sizes`, and has `now` samples. The new
    ones come after the old ones of the first epoch. If there are fewer now, the order is that of a run that begins."""
    sizes = state.get("sizes", [before])
    sizes = [*sizes, now] if now > sizes[-1] else [now] if now < sizes[-1] else sizes
    rest = {key: value for key, value in state.items() if key != "sizes"}
    return rest if len(sizes) == 1 else rest | {"sizes": sizes}


def _joined(parts: list[range]) -> list[range]:
    """Return the ranges in ascending order, with adjacent ones merged."""
    joined: list[range] = []
    for part in sorted(parts, key=lambda part: part.start):
        if joined and joined[-1].stop == part.start:
            joined[-1] = range(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined


class Loader:
    """Loader of this rank's part of the global batches.

    The permutations of all epochs, one after the other, form one endless list of samples that is the same on every
    rank and for every mesh. If the data has grown since the run began (`grow`), the first epoch is a permutation of the
    samples that existed then, followed by one of those added. A step takes the next global_batch entries. Replica r
    reads the r-th equal part of them, and shard rank s the s-th equal part of that. After the number of replicas
    changes, the entries that the earlier replicas left unread come first (`merge_cursors`).
    """

    def __init__(
        self,
        tokens: TokenShards,
        *,
        sequence_length: int,
        global_batch: int,
        micro_batch: int,
        replica: int,
        replicas: int,
        shard_rank: int,
        shard: int,
        seed: int,
    ) -> None:
        """Set the shape of the batches, counted in sequences; `micro_batch` is per rank. Raises DataError if the data
        is smaller than one global batch."""
        assert global_batch % (micro_batch * replicas * shard) == 0, (global_batch, micro_batch, replicas, shard)
        assert 0 <= replica < replicas and 0 <= shard_rank < shard, (replica, replicas, shard_rank, shard)
        self.tokens, self.sequence_length, self.seed = tokens, sequence_length, seed
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.num_samples = max(len(tokens) - 1, 0) // sequence_length
        self.cursor = SampleCursor()
        """Cursor at the entries that no replica has read, provided that all replicas have taken as many steps as
        this one."""
        self.sizes = [self.num_samples]
        """Numbers of samples that the data has had since the run began."""
        if self.num_samples < global_batch:
            raise DataError(
                f"training data: {len(tokens)} tokens there, {global_batch * sequence_length + 1} needed for one step "
                f"of {global_batch} sequences of {sequence_length}; give more text (data.source, data.max_tokens), "
                "or lower train.global_batch or train.sequence_length"
            )
        self._per_rank = global_batch // (replicas * shard)
        self._first = (replica * shard + shard_rank) * self._per_rank
        self._orders: dict[int, np.ndarray] = {}

    def next(self) -> list[torch.Tensor]:
        """Return this rank's micro-batches for the next step: int64 [micro_batch, sequence_length + 1] each."""
        windows = [
            self.tokens.window(self.sample(entry) * self.sequence_length, self.sequence_length + 1)
            for part in self.cursor.peek(self._first, self._per_rank)
            for entry in part
        ]
        self.cursor.advance(self.global_batch)
        oldest = self.cursor.lowest // self.num_samples
        self._orders = {epoch: order for epoch, order in self._orders.items() if epoch >= oldest}
        rows = torch.from_numpy(np.stack(windows).astype(np.int64))
        return list(rows.split(self.micro_batch))

    def sample(self, entry: int) -> int:
        """Return the sample at an entry of the endless list."""
        epoch, place = divmod(entry, self.num_samples)
        if epoch not in self._orders:
            dtype = np.uint32 if self.num_samples <= 1 << 32 else np.uint64
            sizes = self.sizes if epoch == 0 else self.sizes[-1:]
            parts = [
                np.random.default_rng([self.seed, epoch, *([first] if first else [])]).permutation(
                    np.arange(first, end, dtype=dtype)
                )
                for first, end in pairwise([0, *sizes])
            ]
            self._orders[epoch] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return int(self._orders[epoch][place])

    def state_dict(self) -> dict[str, Any]:
        return self.cursor.state_dict() | ({"sizes": self.sizes} if len(self.sizes) > 1 else {})

    def reshard_rule(self) -> Rule:
        """Return the rule by which `state_dict` is resharded: each sample that no replica has read is read once."""
        return by_replica(partial(merge_cursors, global_batch=self.global_batch))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor.load_state_dict(state)
        self.sizes, self._orders = state.get("sizes", [self.num_samples]), {}


class PrefetchLoader:
    """Loader wrapper that reads one step ahead in a background thread, so that training does not wait for a disk that is
    slow at times. Its state excludes the batches read ahead.

    With `pin`, batches are in pinned memory, so that a GPU can copy them while it computes.
    """

    def __init__(self, loader: Loader, timeout_seconds: float, pin: bool = False):
        self.loader, self._timeout, self._pin = loader, timeout_seconds, pin
        self._orders: SimpleQueue[None] = SimpleQueue()
        self._read: SimpleQueue[list[torch.Tensor] | BaseException] = SimpleQueue()
        self._is_coming = False
        self._state = loader.state_dict()
        # A daemon thread, because a hung disk must not keep the process alive after the run has given up on it.
        threading.Thread(target=with_current_device(self._worker), name="reads ahead", daemon=True).start()
        atexit.register(self._drain)

    def next(self) -> list[torch.Tensor]:
        """Return this rank's micro-batches for the next step: int64 [micro_batch, sequence_length + 1] each. Raises
        DataError if they do not arrive within `timeout_seconds`."""
        if not self._is_coming:
            self._request()
        batches = self._receive()
        self._state = self.loader.state_dict()
        self._request()
        return batches

    @property
    def num_samples(self) -> int:
        """Return the number of samples in the data."""
        return self.loader.num_samples

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last batches that `next` returned."""
        return self._state

    def reshard_rule(self) -> Rule:
        """Return the rule by which `state_dict` is resharded."""
        return self.loader.reshard_rule()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, after discarding batches read ahead."""
        if self._is_coming:
            self._receive()
        self.loader.load_state_dict(state)
        self._state = self.loader.state_dict()

    def _drain(self) -> None:
        """Wait at process exit for a read in flight, because the interpreter crashes if it ends while a thread uses
        tensors."""
        if self._is_coming:
            with suppress(Empty):
                self._read.get(timeout=REST_SECONDS)

    def _request(self) -> None:
        self._is_coming = True
        self._orders.put(None)

    def _get(self, seconds: float) -> list[torch.Tensor] | BaseException | None:
        """Return what was read within `seconds`, or announce that the disk is slow and return None."""
        try:
            return self._read.get(timeout=seconds)
        except Empty:
            print(
                f"waiting for the disk with the token shards (at most {self._timeout:g} s)", file=sys.stderr, flush=True
            )
            return None

    def _receive(self) -> list[torch.Tensor]:
        try:
            quiet = min(QUIET_SECONDS, self._timeout)
            if (batches := self._get(quiet)) is None:
                batches = self._read.get(timeout=self._timeout - quiet)
        except Empty:
            raise DataError(
                f"no batch could be read in {self._timeout:g} s (run.timeout_seconds): the disk that holds the token shards does "
                "not answer; start the same command again when it does, to continue from the last checkpoint"
            ) from None
        self._is_coming = False
        if isinstance(batches, BaseException):
            raise batches
        return batches

    def _worker(self) -> None:
        """Serve read requests until the process exits. The thread never ends earlier, because one that ends during
        interpreter shutdown would free tensors and crash the interpreter."""
        while True:
            self._orders.get()
            try:
                batches = self.loader.next()
                self._read.put([batch.pin_memory() for batch in batches] if self._pin else batches)
            except BaseException as error:  # the training thread raises it
                self._read.put(error)


def eval_batches(
    tokens: TokenShards, *, max_tokens: int, sequence_length: int, micro_batch: int, rank: int, world: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return an iterator over this rank's validation batches: (input_ids, labels), each int64
    [micro_batch, sequence_length].

    The first max_tokens // sequence_length windows (at least one, at most all) are assigned to the ranks in turn.
    Every rank yields the same number of batches, all of the same shape. Labels of rows without a window are
    IGNORE_INDEX. Raises DataError if the data has no complete window.
    """
    there = max(len(tokens) - 1, 0) // sequence_length
    if not there:
        raise DataError(
            f"validation data: {len(tokens)} tokens there, {sequence_length + 1} needed for one sequence; raise "
            "data.validation_fraction, give data.validation, or lower train.sequence_length"
        )
    windows = min(max(max_tokens // sequence_length, 1), there)
    per_batch = world * micro_batch
    return (
        _eval_batch(tokens, range(first + rank, min(first + per_batch, windows), world), sequence_length, micro_batch)
        for first in range(0, windows, per_batch)
    )


def _eval_batch(
    tokens: TokenShards, windows: range, sequence_length: int, micro_batch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.zeros(micro_batch, sequence_length, dtype=torch.int64)
    labels = torch.full_like(inputs, IGNORE_INDEX)
    for row, window in enumerate(windows):
        ids = torch.from_numpy(tokens.window(window * sequence_length, sequence_length + 1).astype(np.int64))
        inputs[row], labels[row] = ids[:-1], ids[1:]
    return inputs, labels
