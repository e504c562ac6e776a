"""Batches are read a step ahead, in a thread, so that training does not wait for a disk that is slow now and then."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from typing import Any

import torch

from llmtrain.data.loader import Loader
from llmtrain.errors import DataError


class Ahead:
    """The batches of a loader, and its state as if the next one had not been read yet.

    With `pin` they are in pinned memory, from which a GPU copies them while it computes.
    """

    def __init__(self, loader: Loader, timeout_seconds: float, pin: bool = False):
        self.loader, self._timeout, self._pin = loader, timeout_seconds, pin
        self._thread = ThreadPoolExecutor(1, "reads ahead")
        self._coming: Future[list[torch.Tensor]] | None = None
        self._state = loader.state_dict()

    @property
    def num_samples(self) -> int:
        """See `Loader`."""
        return self.loader.num_samples

    def next(self) -> list[torch.Tensor]:
        """The next step's micro-batches of this rank: int64 [micro_batch, sequence_length + 1] each. DataError if they are
        not there in `timeout_seconds`."""
        coming = self._coming or self._thread.submit(self._read)
        try:
            batches = coming.result(self._timeout)
        except NotInTime:
            raise DataError(
                f"no batch could be read in {self._timeout:g} s (run.timeout_seconds): the disk that holds the token shards does "
                "not answer; start the same command again when it does, to continue from the last checkpoint"
            ) from None
        self._state = self.loader.state_dict()
        self._coming = self._thread.submit(self._read)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """The loader's, after the batches that `next` gave."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        if self._coming is not None:
            self._coming.result()
            self._coming = None
        self.loader.load_state_dict(state)
        self._state = self.loader.state_dict()

    def _read(self) -> list[torch.Tensor]:
        batches = self.loader.next()
        return [batch.pin_memory() for batch in batches] if self._pin else batches
