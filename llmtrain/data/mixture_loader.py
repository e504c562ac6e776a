"""Batches from several texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from llmtrain.data.batch_shape import BatchShape
from llmtrain.data.dataset import TokenShards
from llmtrain.data.loader import Loader, SamplesBefore
from llmtrain.data.mixture import MixtureOrder, max_entries_of
from llmtrain.data.order import SampleOrder, merge_cursors, resize
from llmtrain.data.tokens import Tokens
from llmtrain.errors import DataError


class MixedShards(Tokens):
    """Tokens of several texts, one after the other, each cut to complete samples."""

    def __init__(self, texts: Sequence[TokenShards], sequence_length: int) -> None:
        self._texts = texts
        samples = [max(len(tokens) - 1, 0) // sequence_length for tokens in texts]
        self._starts = np.cumsum([0, *(number * sequence_length for number in samples)])

    def __len__(self) -> int:
        return int(self._starts[-1]) + 1  # the last token is only a label

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

    def __init__(self, texts: Mapping[str, TokenShards], weights: Sequence[float], shape: BatchShape) -> None:
        """Read batches from texts, given by name, in proportion to their `weights`. Raises DataError if a text has no
        complete sample, or if all texts together have fewer samples than one global batch."""
        length = shape.sequence_length
        self.samples = {name: count_samples(name, tokens, length) for name, tokens in texts.items()}
        """Number of samples of each text."""
        self.weights = weights
        super().__init__(MixedShards(list(texts.values()), length), shape)

    def _new_order(self, sizes: Sequence[Sequence[int]] = ()) -> MixtureOrder:
        given = sizes or [()] * len(self.samples)
        numbers = self.samples.values()
        orders = [SampleOrder(number, self.shape.seed, before) for number, before in zip(numbers, given, strict=True)]
        return MixtureOrder(orders, self.weights, self.shape.seed)

    def state_for_length(self, state: dict[str, Any], before: SamplesBefore) -> dict[str, Any]:
        """Return the `state` of a run of another length as a state of this run. `before` returns how many samples a text had in
        that run."""
        rest = {key: value for key, value in state.items() if key != "sizes"}
        sizes = []
        for index, (name, now) in enumerate(self.samples.items()):
            earlier = before(name, now, partial(max_entries_of, self.order.shares[index]))
            text_state = {"sizes": state["sizes"][index]} if "sizes" in state else {}
            sizes.append(resize(text_state, earlier, now).get("sizes", [now]))
        return rest if all(len(text_sizes) == 1 for text_sizes in sizes) else rest | {"sizes": sizes}

    def read_by_text(self, states: Sequence[dict[str, Any]]) -> dict[str, int]:
        """Return the number of sequences that a run has read of each text, by the text's name. `states` has the loader's
        state of each replica."""
        merged = merge_cursors(states, self.global_batch)
        counts = self.order.count(range(merged["position"]))
        for start, stop in merged.get("left", []):
            counts -= self.order.count(range(start, stop))
        return dict(zip(self.samples, counts.tolist(), strict=True))
