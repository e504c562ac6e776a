"""A key-value store that answers in time or not at all: torch's own client waits for a host that is cut off until TCP gives
up, a quarter of an hour later, and holds up everybody who asks it meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import DistNetworkError, Store


class TimeoutStore:
    """Some of a store's operations; each raises DistNetworkError if there is no answer within `seconds`."""

    def __init__(self, store: Store, seconds: float):
        self._store, self._seconds = store, seconds

    def set(self, key: str, value: str) -> None:
        """Write a key."""
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """Read a key that is there."""
        return self._ask(lambda: self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        """Whether all these keys are there."""
        return self._ask(lambda: self._store.check(keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; what it is now."""
        return self._ask(lambda: self._store.add(key, amount))

    def _ask(self, operation: Callable[[], Any]) -> Any:
        answer: list[Any] = []

        def ask() -> None:
            try:
                answer.append(operation())
            except Exception as error:
                answer.append(error)

        # A thread for each question: one that hangs in the client can't be taken back.
        asking = threading.Thread(target=ask, daemon=True, name="asks the store")
        asking.start()
        asking.join(self._seconds)
        if not answer:
            raise DistNetworkError(f"no answer from the store for {self._seconds:g} s")
        if isinstance(answer[0], Exception):
            raise answer[0]
        return answer[0]
