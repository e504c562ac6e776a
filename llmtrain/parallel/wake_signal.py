"""How the first replica to arrive at an iteration wakes the others: a key in the job's store, one for each iteration."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

PATIENCE = timedelta(days=1)
"""A waiting thread holds nobody up, so it waits as long as training takes."""


class WakeSignal:
    """Announcing and waiting happen on two threads, each with a connection of its own. Announcing twice is announcing
    once, so several replicas may be first."""

    def __init__(self, store: dist.Store):
        self._announcing, self._waiting = store, store.clone()

    def announce(self, iteration: int) -> None:
        """Start iteration `iteration` on all replicas, if it has not started."""
        self._announcing.set(_key(iteration), b"go")

    def wait(self, iteration: int) -> bool:
        """Wait until that iteration has started (True), or there will be none any more (False)."""
        self._waiting.wait([_key(iteration)], PATIENCE)
        return self._waiting.get(_key(iteration)) == b"go"

    def end(self, iteration: int) -> None:
        """There will be no iteration `iteration`: whoever waits for it can go."""
        self._announcing.set(_key(iteration), b"end")

    def forget(self, iterations: Iterable[int]) -> None:
        """Nobody will wait for these any more."""
        for iteration in iterations:
            self._announcing.delete_key(_key(iteration))


def _key(iteration: int) -> str:
    return f"llmtrain/activation/{iteration}"
