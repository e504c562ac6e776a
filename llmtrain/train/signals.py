"""Stop requests from the operating system. A handler only sets a flag; the trainer agrees on it with all ranks.

A different signal is not a second request, because Slurm sends SIGUSR1 ahead of SIGTERM, and the checkpoint
that the first signal started should be completed.
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
"""Interval within which equal signals are one request, because a terminal and the launcher both pass on one
Ctrl-C."""


class StopRequest:
    """Stop flag of this process. The same signal again, later, ends the process at once."""

    def __init__(self) -> None:
        self.requested = False
        self._asked_at = dict.fromkeys(REQUESTS, math.inf)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal without collectives and without taking a lock."""
        if time.monotonic() - self._asked_at[number] > SAME_REQUEST_SECONDS:
            name = signal.Signals(number).name
            os.write(2, f"a second {name}: stopped at once; the last whole checkpoint stays\n".encode())
            os._exit(FAILED)
        self.requested = True
        self._asked_at[number] = min(self._asked_at[number], time.monotonic())


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Install handlers for stop requests, and restore the previous handlers on exit."""
    request = StopRequest()
    before = {number: signal.signal(number, request.handle) for number in REQUESTS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
