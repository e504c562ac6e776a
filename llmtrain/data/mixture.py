"""Mixture of texts: which text each sequence of a run comes from, in exact shares.

The endless list of entries is cut into blocks of 1,000. In each block, every text has its share of the entries, rounded
by largest remainders, in an order set by the seed and the block. The k-th entry of a text is the k-th of its own
endless list of samples (`SampleOrder`), so every text has its own epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from llmtrain.data.order import SampleOrder
from llmtrain.seeding import derive_seed

BLOCK = 1000
"""Entries per block. In each block, shares are exact to one sequence per text."""


def shares_of(weights: Sequence[float], entries: int = BLOCK) -> list[int]:
    """Return how many of `entries` each text has: its exact share rounded down, plus one for the texts with the largest
    remainders. Among equal remainders, earlier texts take precedence."""
    exact = [weight * entries / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda text: shares[text] - exact[text])
    for text in by_remainder[: entries - sum(shares)]:
        shares[text] += 1
    return shares


def max_entries_of(share: int, entries: int) -> int:
    """Return an upper bound on how many of the first `entries` are of a text that has `share` entries of each block."""
    return min(entries, -(-entries // BLOCK) * share)


class MixtureOrder:
    """Endless list of samples of several texts. The samples are numbered one text after the other. Used like `SampleOrder`."""

    def __init__(self, orders: Sequence[SampleOrder], weights: Sequence[float], seed: int) -> None:
        self.orders, self.shares = list(orders), shares_of(weights)
        self._first = [0, *accumulate(order.num_samples for order in orders)]
        """Index of each text's first sample, followed by the total number of samples."""
        self._seed = derive_seed(seed, "mixture")
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """Blocks that are being read. Only the thread that reads samples may use them: `count` may run beside it."""

    def locate(self, entry: int) -> tuple[int, int]:
        """Return the index of the text at an entry, and the index of the entry in that text's own list."""
        block, index = divmod(entry, BLOCK)
        if block not in self._blocks:
            self._blocks[block] = self._new_block(block)
        texts, ranks = self._blocks[block]
        text = int(texts[index])
        return text, block * self.shares[text] + int(ranks[index])

    def sample(self, entry: int) -> int:
        """Return the sample at an entry of the list."""
        text, own_entry = self.locate(entry)
        return self._first[text] + self.orders[text].sample(own_entry)

    def count(self, entries: range) -> np.ndarray:
        """Return how many of the entries are of each text. Thread-safe."""
        return self._count_before(entries.stop) - self._count_before(entries.start)

    def forget(self, before: int) -> None:
        """Free the memory of blocks and epochs whose entries are all before the given one."""
        oldest = before // BLOCK
        self._blocks = {block: made for block, made in self._blocks.items() if block >= oldest}
        for order, share in zip(self.orders, self.shares, strict=True):
            order.forget(oldest * share)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that makes another order equal to this one, given the same seed, numbers of samples and weights."""
        sizes = [order.sizes for order in self.orders]
        return {"sizes": sizes} if any(len(text_sizes) > 1 for text_sizes in sizes) else {}

    def _new_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the text of each entry of a block, and its rank among that text's entries of the block."""
        sorted_texts = np.repeat(np.arange(len(self.shares)), self.shares)
        texts = np.random.default_rng([self._seed, block]).permutation(sorted_texts)
        starts = np.cumsum([0, *self.shares[:-1]])
        ranks = np.empty(BLOCK, dtype=np.int64)
        ranks[np.argsort(texts, kind="stable")] = np.arange(BLOCK) - starts[sorted_texts]
        return texts, ranks

    def _count_before(self, entry: int) -> np.ndarray:
        block, index = divmod(entry, BLOCK)
        counts = block * np.array(self.shares, dtype=np.int64)
        return counts + np.bincount(self._new_block(block)[0][:index], minlength=len(counts)) if index else counts
