"""Batches are read a step ahead, in a thread, so that training does not wait for a disk that is slow now and then."""

from __future__ import annotations

import atexit
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import torch

from llmtrain.data.loader import Loader
from llmtrain.errors import DataError
from llmtrain.threads import with_current_device

REST_SECONDS = 2.0
"""How long the process's end waits for a batch that nobody needs any more; a disk that does not answer holds no tensors."""
Read = list[torch.Tensor] | BaseException
"""Micro-batches, or why there are none."""


class PrefetchLoader:
    """The batches of a loader, and its state as if the next one had not been read yet.

    With `pin` they are in pinned memory, from which a GPU copies them while it computes.
    """

    def __init__(self, loader: Loader, timeout_seconds: float, pin: bool = False):
        self.loader, self._timeout, self._pin = loader, timeout_seconds, pin
        self._orders: SimpleQueue[None] = SimpleQueue()
        self._read: SimpleQueue[Read] = SimpleQueue()
        self._is_coming = False
        self._state = loader.state_dict()
        # A daemon: a disk that hangs must not keep a run that has given up on it from ending.
        threading.Thread(target=with_current_device(self._worker), name="reads ahead", daemon=True).start()
        atexit.register(self._drain)

    def next(self) -> list[torch.Tensor]:
        """The next step's micro-batches of this rank: int64 [micro_batch, sequence_length + 1] each. DataError if they are
        not there in `timeout_seconds`."""
        if not self._is_coming:
            self._request()
        batches = self._receive()
        self._state = self.loader.state_dict()
        self._request()
        return batches

    def state_dict(self) -> dict[str, Any]:
        """The loader's, after the batches that `next` gave."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        if self._is_coming:
            self._receive()
        self.loader.load_state_dict(state)
        self._state = self.loader.state_dict()

    def _drain(self) -> None:
        """At the process's end: the interpreter crashes when it ends under a thread that is busy with tensors."""
        if self._is_coming:
            with suppress(Empty):
                self._read.get(timeout=REST_SECONDS)

    def _request(self) -> None:
        self._is_coming = True
        self._orders.put(None)

    def _receive(self) -> list[torch.Tensor]:
        try:
            batches = self._read.get(timeout=self._timeout)
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
        """The thread's life, as long as the process's: one that ended while the interpreter does would drop tensors then, and
        crash it."""
        while True:
            self._orders.get()
            try:
                batches = self.loader.next()
                self._read.put([batch.pin_memory() for batch in batches] if self._pin else batches)
            except BaseException as error:  # the training thread raises it
                self._read.put(error)
