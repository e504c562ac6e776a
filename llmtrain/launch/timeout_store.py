"""Access to a key-value store that may stop answering."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import DistNetworkError, Store


class TimeoutStore:
    """Wrapper around a store. Each operation raises DistNetworkError if the store does not answer within `seconds`."""

    def __init__(self, store: Store, seconds: float):
        self._store, self._seconds = store, seconds

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """Return the value of an existing key."""
        return self._ask(lambda: self._store.get(key))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return self._ask(lambda: self._store.check(keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return self._ask(lambda: self._store.add(key, amount))

    def _ask(self, operation: Callable[[], Any]) -> Any:
        answer: list[Any] = []

        def ask() -> None:
            try:
                answer.append(operation())
            except Exception as error:
                answer.append(error)

        # One thread per request, because a request that hangs in the client can't be canceled.
        asking = threading.Thread(target=ask, daemon=True, name="asks the store")
        asking.start()
        asking.join(self._seconds)
        if not answer:
            raise DistNetworkError(f"no answer from the store for {self._seconds:g} s")
        if isinstance(answer[0], Exception):
            raise answer[0]
        return answer[0]
