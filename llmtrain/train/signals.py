"""Requests to stop, from the operating system. A handler only sets a flag; the trainer agrees on it with all ranks."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_REQUEST_SECONDS = 2.0
"""A terminal and the launcher both pass on one Ctrl-C: signals this close together are one request."""


class StopRequest:
    """Whether this process was asked to stop. A second SIGINT, later, ends it at once."""

    def __init__(self) -> None:
        self.requested = False
        self._asked_at = 0.0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler: no I/O, no collectives."""
        again = self.requested and time.monotonic() - self._asked_at > SAME_REQUEST_SECONDS
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.requested:
            self.requested, self._asked_at = True, time.monotonic()


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Listen for requests; the handlers that were there come back afterwards."""
    request = StopRequest()
    before = {number: signal.signal(number, request.handle) for number in REQUESTS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
