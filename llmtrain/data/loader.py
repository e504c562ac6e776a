"""Who reads what: training batches in an order that the seed alone decides, and a fixed set of validation batches.

Sample i is the window of sequence_length + 1 tokens that starts at i x sequence_length: its first sequence_length
tokens are the inputs, its last the labels. Documents are packed: a window may hold the end of one and the start of the
next, eos between them; nothing is padded; what doesn't fill a last window is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from llmtrain.data.cursor import SampleCursor
from llmtrain.data.shards import TokenShards
from llmtrain.errors import DataError

IGNORE_INDEX = -100
"""Label of a position that does not count; what torch's cross entropy ignores."""


class Loader:
    """This rank's part of the global batches.

    All epochs' permutations of the samples, one after the other, are one endless list, the same on every rank whatever
    the mesh. A step takes the next global_batch entries; replica r has the r-th equal part of them, and shard rank s
    the s-th equal part of that. A run that other replicas began first takes what these left (`cursor.merge_cursors`).
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
        """Batches count sequences; `micro_batch` is one rank's. DataError: less data than one global batch."""
        assert global_batch % (micro_batch * replicas * shard) == 0, (global_batch, micro_batch, replicas, shard)
        assert 0 <= replica < replicas and 0 <= shard_rank < shard, (replica, replicas, shard_rank, shard)
        self.tokens, self.sequence_length, self.seed = tokens, sequence_length, seed
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.num_samples = max(len(tokens) - 1, 0) // sequence_length
        self.cursor = SampleCursor()
        """What all replicas together have not taken yet, if they keep step with this one: the whole state."""
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
        """Passes over the data so far."""
        return self.cursor.num_read / self.num_samples

    def next(self) -> list[torch.Tensor]:
        """The next step's micro-batches of this rank: int64 [micro_batch, sequence_length + 1] each."""
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
        """The sample at an entry of the endless list."""
        epoch, place = divmod(entry, self.num_samples)
        if epoch not in self._orders:
            dtype = np.uint32 if self.num_samples <= 1 << 32 else np.uint64
            samples = np.arange(self.num_samples, dtype=dtype)
            self._orders[epoch] = np.random.default_rng([self.seed, epoch]).permutation(samples)
        return int(self._orders[epoch][place])

    def state_dict(self) -> dict[str, Any]:
        return self.cursor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor.load_state_dict(state)


def eval_batches(
    tokens: TokenShards, *, max_tokens: int, sequence_length: int, micro_batch: int, rank: int, world: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's validation batches: (input_ids, labels), int64 [micro_batch, sequence_length] each.

    The first max_tokens // sequence_length windows (at least one, at most what there is) are dealt out in turn. Every
    rank yields equally many batches of the same shape; rows that are missing have no labels (IGNORE_INDEX).
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
