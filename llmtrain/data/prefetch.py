"""Read-ahead of training batches by one step in a background thread, so that training does not wait for a disk that
is slow at times."""

from __future__ import annotations

import atexit
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import torch

from llmtrain.data.loader import Loader
from llmtrain.errors import DataError
from llmtrain.reshard import Rule
from llmtrain.threads import with_current_device

REST_SECONDS = 2.0
"""Seconds that process exit waits for a read in flight. A read that hangs longer holds no tensors and is safe to
abandon."""
Read = list[torch.Tensor] | BaseException
"""Micro-batches, or the exception that the read raised."""


class PrefetchLoader:
    """Loader wrapper that reads one step ahead. Its state excludes the batches read ahead.

    With `pin`, batches are in pinned memory, so that a GPU can copy them while it computes.
    """

    def __init__(self, loader: Loader, timeout_seconds: float, pin: bool = False):
        self.loader, self._timeout, self._pin = loader, timeout_seconds, pin
        self._orders: SimpleQueue[None] = SimpleQueue()
        self._read: SimpleQueue[Read] = SimpleQueue()
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
        """Serve read requests until the process exits. The thread never ends earlier, because one that ends during
        interpreter shutdown would free tensors and crash the interpreter."""
        while True:
            self._orders.get()
            try:
                batches = self.loader.next()
                self._read.put([batch.pin_memory() for batch in batches] if self._pin else batches)
            except BaseException as error:  # the training thread raises it
                self._read.put(error)
