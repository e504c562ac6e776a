"""Signal by which the first replica to reach an iteration wakes the others: one key per iteration in the job's
store."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

PATIENCE = timedelta(days=1)
"""Time limit of one wait. It is long because a waiting thread delays no replica."""


class WakeSignal:
    """Wake-up signal of the replicas. One thread announces and another waits, each over its own connection to the
    store. Announcing an iteration twice has no further effect, so several replicas may announce the same one."""

    def __init__(self, store: dist.Store):
        self._announcing, self._waiting = store, store.clone()

    def announce(self, iteration: int) -> None:
        """Start iteration `iteration` on all replicas, if it has not started."""
        self._announcing.set(_key(iteration), b"go")

    def wait(self, iteration: int) -> bool:
        """Wait until iteration `iteration` has started and return True, or return False once `end` rules it out."""
        self._waiting.wait([_key(iteration)], PATIENCE)
        return self._waiting.get(_key(iteration)) == b"go"

    def end(self, iteration: int) -> None:
        """Announce that iteration `iteration` will never start, so that threads waiting for it return."""
        self._announcing.set(_key(iteration), b"end")

    def forget(self, iterations: Iterable[int]) -> None:
        """Delete the keys of iterations that no thread will wait for any longer."""
        for iteration in iterations:
            self._announcing.delete_key(_key(iteration))


def _key(iteration: int) -> str:
    return f"llmtrain/activation/{iteration}"
