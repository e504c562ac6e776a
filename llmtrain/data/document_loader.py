"""Training batches of padded documents (`data.packing: none`), and validation batches of them.

The shuffled order of `SampleOrder` is cut into windows of `WINDOW_BATCHES` global batches. The documents of a window
are sorted by length and cut into units as large as a micro-batch, and the units are shuffled. A micro-batch therefore
has documents of similar length and little padding, but the micro-batches of one step differ in length, so that ranks
have unequal work. The order depends on the seed, the documents, the global batch, and the micro-batch that the run
began with. It is the same on every mesh, and every document occurs once per epoch. The batch in which one epoch ends
and the next begins is not sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from llmtrain.data.batch_shape import BatchShape
from llmtrain.data.documents import DocumentSamples
from llmtrain.data.loader import Loader
from llmtrain.data.order import SampleOrder
from llmtrain.errors import DataError
from llmtrain.loss import IGNORE_INDEX, inputs_and_labels
from llmtrain.seeding import derive_seed

WINDOW_BATCHES = 32
"""Number of global batches whose documents are sorted together."""
LENGTH_STEP = 8
"""Multiple to which padded lengths are rounded up: tensor cores need such lengths, and fewer different shapes occur."""


class BucketedOrder:
    """Order of samples in which neighbors have similar lengths. The module's docstring describes it."""

    def __init__(
        self,
        order: SampleOrder,
        lengths: Callable[[np.ndarray], np.ndarray],
        global_batch: int,
        unit: int,
        seed: int,
    ) -> None:
        """Arrange the samples of `order`. `lengths` maps an array of samples to their lengths in tokens. `unit` is the
        number of samples that stay together, and divides `global_batch`."""
        assert global_batch % unit == 0, (global_batch, unit)
        self.order, self.unit = order, unit
        self._lengths, self._global_batch, self._seed = lengths, global_batch, seed
        self._windows: dict[range, np.ndarray] = {}

    @property
    def sizes(self) -> list[int]:
        """Return the number of samples when the run began, followed by the number after each growth of the data."""
        return self.order.sizes

    def sample(self, entry: int) -> int:
        """Return the sample at an entry of the endless list."""
        window = self._window(entry)
        if entry not in window:
            return self.order.sample(entry)
        if window not in self._windows:
            self._windows[window] = self._arranged(window)
        return int(self._windows[window][entry - window.start])

    def forget(self, before: int) -> None:
        """Free the memory of windows and epochs whose entries are all before the given one."""
        self._windows = {window: samples for window, samples in self._windows.items() if window.stop > before}
        self.order.forget(before)

    def _window(self, entry: int) -> range:
        """Return the range of entries that are sorted together with the given one. If the batch of the given entry is not
        sorted, the range does not contain it."""
        part, batch = self._shuffled_part(entry), self._global_batch
        first, end = -(-part.start // batch) * batch, part.stop // batch * batch
        size = WINDOW_BATCHES * batch
        start = first + (entry - first) // size * size
        return range(start, min(start + size, end)) if first <= entry else range(0)

    def _shuffled_part(self, entry: int) -> range:
        """Return the entries that are shuffled together with the given one: those of its epoch or, in the first epoch, those
        of the samples that were added to the data at the same time."""
        count = self.order.num_samples
        epoch = entry // count
        if epoch:
            return range(epoch * count, (epoch + 1) * count)
        number = next(number for number, size in enumerate(self.sizes) if entry < size)
        return range(self.sizes[number - 1] if number else 0, self.sizes[number])

    def _arranged(self, window: range) -> np.ndarray:
        samples = np.array([self.order.sample(entry) for entry in window])
        units = samples[np.argsort(self._lengths(samples), kind="stable")].reshape(-1, self.unit)
        draw = np.random.default_rng(derive_seed(self._seed, "order of units", window.start))
        return units[draw.permutation(len(units))].reshape(-1)


class DocumentLoader(Loader):
    """Loader of this rank's part of the global batches, whose samples are padded documents. See `Loader`."""

    def __init__(self, samples: DocumentSamples, shape: BatchShape) -> None:
        """Raise DataError if there are fewer samples than one global batch."""
        self.samples = samples
        super().__init__(samples.tokens, shape)
        self._set_order(self.order.sizes, self.micro_batch)

    @property
    def attended_length(self) -> float:
        return self.samples.attended_length()

    def next(self) -> list[torch.Tensor]:
        """Return this rank's micro-batches for the next step: int64 [micro_batch, T + 1] each, where T is the number of tokens
        of the micro-batch's longest document, rounded up to a multiple of LENGTH_STEP. Padding is IGNORE_INDEX."""
        everyone = np.array(self._samples(0, self.global_batch))
        self.mean_replica_tokens = int(self.samples.lengths(everyone).sum()) / self.shape.replicas
        return super().next()

    def state_dict(self) -> dict[str, Any]:
        return self.cursor.state_dict() | {"sizes": self.order.sizes, "unit": self.order.unit} | self.shape.state_dict()

    def _merge(self, states: Sequence[dict[str, Any]], global_batch: int) -> dict[str, Any]:
        return super()._merge(states, global_batch) | {"unit": states[0]["unit"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        sizes = state.get("sizes", [self.num_samples])
        if sizes[-1] != self.num_samples:
            raise DataError(
                f"training data: {self.num_samples:,} documents, but {sizes[-1]:,} when the run's checkpoint was "
                "written; give the same text, or start another run with run.name=NAME"
            )
        self.cursor.load_state_dict(state)
        self._set_order(sizes, state["unit"])

    def _set_order(self, sizes: Sequence[int], unit: int) -> None:
        shuffled = SampleOrder(self.num_samples, self.shape.seed, sizes)
        self.order = BucketedOrder(shuffled, self.samples.lengths, self.global_batch, unit, self.shape.seed)

    def _count_samples(self) -> int:
        return len(self.samples)

    def _shortage(self) -> str:
        return (
            f"{self.num_samples} documents of at most {self.sequence_length} tokens, but one step needs {self.global_batch}; "
            "give more text (data.source, data.max_tokens), or lower train.global_batch"
        )

    def _read(self, samples: Sequence[int]) -> list[torch.Tensor]:
        documents = [self.samples.read(sample) for sample in samples]
        return [
            padded(documents[first : first + self.micro_batch], self.micro_batch, self.sequence_length)
            for first in range(0, len(documents), self.micro_batch)
        ]


def padded(documents: Sequence[np.ndarray], rows: int, sequence_length: int) -> torch.Tensor:
    """Return documents (int64), each with the token before it, as int64 [rows, T + 1], padded with IGNORE_INDEX. T is the longest
    document's length, rounded up to a multiple of LENGTH_STEP but at most to `sequence_length`."""
    longest = max((len(ids) - 1 for ids in documents), default=1)
    length = min(-(-longest // LENGTH_STEP) * LENGTH_STEP, sequence_length)
    batch = torch.full((rows, length + 1), IGNORE_INDEX, dtype=torch.int64)
    for row, ids in zip(batch, documents, strict=False):
        row[: len(ids)] = torch.from_numpy(ids)
    return batch


def document_eval_batches(
    samples: DocumentSamples, *, max_tokens: int, sequence_length: int, micro_batch: int, rank: int, world: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return an iterator over this rank's validation batches: (input_ids, labels), each int64 [micro_batch, T].

    The first samples that have at most `max_tokens` tokens together (at least one) are sorted by length and assigned
    to the ranks in turn. Every rank yields the same number of batches. Labels of padding and of rows without a sample
    are IGNORE_INDEX. Raises DataError if there is no sample.
    """
    if not len(samples):
        raise DataError("validation data: no documents; raise data.validation_fraction, or give data.validation")
    count = max(samples.count_within(max_tokens), 1)
    by_length = np.argsort(samples.lengths(np.arange(count)), kind="stable")
    per_batch = world * micro_batch
    return (
        inputs_and_labels(
            padded(
                [samples.read(sample) for sample in by_length[first + rank : first + per_batch : world]],
                micro_batch,
                sequence_length,
            )
        )
        for first in range(0, count, per_batch)
    )
