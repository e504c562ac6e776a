"""Requests to stop, from the operating system. A handler only sets a flag; the trainer agrees on it with all ranks.

Another signal than the first is no second request: Slurm sends SIGUSR1 ahead of SIGTERM, and the checkpoint that the first one
began should be finished.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from llmtrain.errors import FAILED

REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_REQUEST_SECONDS = 2.0
"""A terminal and the launcher both pass on one Ctrl-C: signals this close together are one request."""


class StopRequest:
    """Whether this process was asked to stop. The same signal again, later, ends it at once."""

    def __init__(self) -> None:
        self.requested = False
        self._asked_at = dict.fromkeys(REQUESTS, math.inf)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler: no collectives, and nothing that takes a lock."""
        if time.monotonic() - self._asked_at[number] > SAME_REQUEST_SECONDS:
            name = signal.Signals(number).name
            os.write(2, f"a second {name}: stopped at once; the last whole checkpoint stays\n".encode())
            os._exit(FAILED)
        self.requested = True
        self._asked_at[number] = min(self._asked_at[number], time.monotonic())


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
