"""Training batches in an order set by the seed, and a fixed set of validation batches.

Sample i is the window of sequence_length + 1 tokens that starts at token i x sequence_length. Its first
sequence_length tokens are the inputs, its last sequence_length tokens the labels. Documents are packed: a window
may hold the end of one and the start of the next, separated by eos. Nothing is padded, and tokens that do not fill
a last window are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from llmtrain.data.cursor import SampleCursor, merge_cursors
from llmtrain.data.shards import TokenShards
from llmtrain.errors import DataError
from llmtrain.reshard import Rule, by_replica

IGNORE_INDEX = -100
"""Label of positions excluded from the loss; the default `ignore_index` of torch's cross entropy."""


class Loader:
    """Loader of this rank's part of the global batches.

    The permutations of all epochs, one after the other, form one endless list of samples that is the same on every
    rank and for every mesh. A step takes the next global_batch entries. Replica r reads the r-th equal part of
    them, and shard rank s the s-th equal part of that. After a change of replicas, the entries that the earlier
    ones left unread come first (`cursor.merge_cursors`).
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
        """Set the shape of the batches, counted in sequences; `micro_batch` is per rank. Raises DataError if there
        is less data than one global batch."""
        assert global_batch % (micro_batch * replicas * shard) == 0, (global_batch, micro_batch, replicas, shard)
        assert 0 <= replica < replicas and 0 <= shard_rank < shard, (replica, replicas, shard_rank, shard)
        self.tokens, self.sequence_length, self.seed = tokens, sequence_length, seed
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.num_samples = max(len(tokens) - 1, 0) // sequence_length
        self.cursor = SampleCursor()
        """Entries that no replica has taken yet, provided that all have taken as many steps as this one. The
        loader's only state."""
        if self.num_samples < global_batch:
            raise DataError(
                f"training data: {len(tokens)} tokens there, {global_batch * sequence_length + 1} needed for one step "
                f"of {global_batch} sequences of {sequence_length}; give more text (data.source, data.max_tokens), "
                "or lower train.global_batch or train.sequence_length"
            )
        self._per_rank = global_batch // (replicas * shard)
        self._first = (replica * shard + shard_rank) * self._per_rank
        self._orders: dict[int, np.ndarray] = {}

    @property
    def epoch(self) -> float:
        """Return the number of passes over the data so far, which may be fractional."""
        return self.cursor.num_read / self.num_samples

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
            samples = np.arange(self.num_samples, dtype=dtype)
            self._orders[epoch] = np.random.default_rng([self.seed, epoch]).permutation(samples)
        return int(self._orders[epoch][place])

    def state_dict(self) -> dict[str, Any]:
        return self.cursor.state_dict()

    def reshard_rule(self) -> Rule:
        """Return the rule by which `state_dict` is resharded: each sample that some replica has left is read once."""
        return by_replica(partial(merge_cursors, global_batch=self.global_batch))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor.load_state_dict(state)


def eval_batches(
    tokens: TokenShards, *, max_tokens: int, sequence_length: int, micro_batch: int, rank: int, world: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return an iterator over this rank's validation batches: (input_ids, labels), each int64
    [micro_batch, sequence_length].

    The first max_tokens // sequence_length windows are dealt out in turn: at least one, at most all. Every rank
    yields equally many batches of the same shape. Labels of missing rows are IGNORE_INDEX. Raises DataError if the
    data has no complete window.
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
