"""Mixture of texts: which text each sequence of a run comes from, in exact shares.

The endless list of entries is cut into blocks of 1,000. In each block, every text has its share of the entries, rounded
by largest remainders, in an order set by the seed and the block. The k-th entry of a text is the k-th of its own
endless list of samples (`SampleOrder`), so every text has its own epochs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from llmtrain.data.dataset import TokenShards
from llmtrain.data.loader import Loader, SamplesBefore
from llmtrain.data.order import SampleOrder, grow, merge_cursors
from llmtrain.errors import DataError
from llmtrain.seeding import derive_seed

BLOCK = 1000
"""Entries in which shares are exact to one sequence per text."""


def shares_of(weights: Sequence[float], entries: int = BLOCK) -> list[int]:
    """Return how many of `entries` each text has: its exact share rounded down, and one more for the largest remainders,
    the first of equal ones."""
    exact = [weight * entries / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda text: shares[text] - exact[text])
    for text in by_remainder[: entries - sum(shares)]:
        shares[text] += 1
    return shares


def most_of(share: int, entries: int) -> int:
    """Return an upper bound on how many of the first `entries` are of a text with this share of a block."""
    return min(entries, -(-entries // BLOCK) * share)


class MixtureOrder:
    """Endless list of samples of several texts, numbered one text after the other. Used like `SampleOrder`."""

    def __init__(self, orders: Sequence[SampleOrder], weights: Sequence[float], seed: int) -> None:
        self.orders, self.shares = list(orders), shares_of(weights)
        self._first = [0, *accumulate(order.num_samples for order in orders)]
        """Number of each text's first sample, and of all samples."""
        self._seed = derive_seed(seed, "mixture")
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def locate(self, entry: int) -> tuple[int, int]:
        """Return the text at an entry, and which of that text's own entries it is."""
        block, index = divmod(entry, BLOCK)
        texts, ranks = self._block(block)
        text = int(texts[index])
        return text, block * self.shares[text] + int(ranks[index])

    def sample(self, entry: int) -> int:
        """Return the sample at an entry of the list."""
        text, own_entry = self.locate(entry)
        return self._first[text] + self.orders[text].sample(own_entry)

    def count(self, entries: range) -> np.ndarray:
        """Return how many of the entries are of each text."""
        return self._count_before(entries.stop) - self._count_before(entries.start)

    def forget(self, before: int) -> None:
        """Free the memory of blocks and epochs whose entries are all before the given one."""
        oldest = before // BLOCK
        self._blocks = {block: made for block, made in self._blocks.items() if block >= oldest}
        for order, share in zip(self.orders, self.shares, strict=True):
            order.forget(oldest * share)

    def state_dict(self) -> dict[str, Any]:
        """Return what another order needs to be the same, beside the numbers of samples and the weights."""
        sizes = [order.sizes for order in self.orders]
        return {"sizes": sizes} if any(len(of_text) > 1 for of_text in sizes) else {}

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the text of each entry of a block, and its rank among that text's entries of the block."""
        if block not in self._blocks:
            sorted_texts = np.repeat(np.arange(len(self.shares)), self.shares)
            texts = np.random.default_rng([self._seed, block]).permutation(sorted_texts)
            starts = np.cumsum([0, *self.shares[:-1]])
            ranks = np.empty(BLOCK, dtype=np.int64)
            ranks[np.argsort(texts, kind="stable")] = np.arange(BLOCK) - starts[sorted_texts]
            self._blocks[block] = texts, ranks
        return self._blocks[block]

    def _count_before(self, entry: int) -> np.ndarray:
        block, index = divmod(entry, BLOCK)
        counts = block * np.array(self.shares, dtype=np.int64)
        return counts + np.bincount(self._block(block)[0][:index], minlength=len(counts)) if index else counts


class MixedShards:
    """Tokens of several texts, one after the other, each cut to complete samples. Read like `TokenShards`."""

    def __init__(self, texts: Sequence[TokenShards], sequence_length: int) -> None:
        self._texts = texts
        samples = [max(len(tokens) - 1, 0) // sequence_length for tokens in texts]
        self._starts = np.cumsum([0, *(number * sequence_length for number in samples)])

    def __len__(self) -> int:
        return int(self._starts[-1]) + 1  # the last token is only a label

    @property
    def most(self) -> int:
        """Return the largest number of tokens that there can ever be."""
        return len(self)

    def window(self, start: int, length: int) -> np.ndarray:
        """Return the sample of `length` tokens at `start`, which must be the start of a sample."""
        text = int(np.searchsorted(self._starts, start, side="right")) - 1
        return self._texts[text].window(start - int(self._starts[text]), length)


def count_samples(name: str, tokens: TokenShards, sequence_length: int) -> int:
    """Return the number of samples of a text. Raises DataError if there is none."""
    if len(tokens) <= sequence_length:
        raise DataError(
            f"training data: {len(tokens)} tokens of {name}, {sequence_length + 1} needed for one sequence of {sequence_length}; "
            "give more text (data.sources, data.max_tokens), or lower train.sequence_length"
        )
    return (len(tokens) - 1) // sequence_length


class MixtureLoader(Loader):
    """Loader of batches from several texts."""

    order: MixtureOrder

    def __init__(self, texts: Mapping[str, TokenShards], weights: Sequence[float], **shape: int) -> None:
        """Take `shape` as `Loader` does. Raises DataError if a text has no complete sample, or all together are smaller
        than one global batch."""
        length = shape["sequence_length"]
        self.samples = {name: count_samples(name, tokens, length) for name, tokens in texts.items()}
        """Number of samples of each text."""
        self.weights = weights
        super().__init__(MixedShards(list(texts.values()), length), **shape)

    def _new_order(self, sizes: Sequence[Sequence[int]] = ()) -> MixtureOrder:
        given = sizes or [()] * len(self.samples)
        numbers = self.samples.values()
        orders = [SampleOrder(number, self._seed, before) for number, before in zip(numbers, given, strict=True)]
        return MixtureOrder(orders, self.weights, self._seed)

    def grown(self, state: dict[str, Any], before: SamplesBefore) -> dict[str, Any]:
        """Return a state of a run that was shorter or longer. `before` returns how many samples of a text that had."""
        rest = {key: value for key, value in state.items() if key != "sizes"}
        sizes = []
        for index, (name, now) in enumerate(self.samples.items()):
            earlier = before(name, now, partial(most_of, self.order.shares[index]))
            of_text = {"sizes": state["sizes"][index]} if "sizes" in state else {}
            sizes.append(grow(of_text, earlier, now).get("sizes", [now]))
        return rest if all(len(of_text) == 1 for of_text in sizes) else rest | {"sizes": sizes}

    def read_by_text(self, states: Sequence[dict[str, Any]]) -> dict[str, int]:
        """Return the sequences that a run has read of each text, by name, given the state of each replica."""
        merged = merge_cursors(states, self.global_batch)
        counts = self.order.count(range(merged["position"]))
        for start, stop in merged.get("left", []):
            counts -= self.order.count(range(start, stop))
        return dict(zip(self.samples, counts.tolist(), strict=True))
