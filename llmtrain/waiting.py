"""Waits that announce themselves, so that a slow one does not look like a hang. Imports no torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

QUIET_SECONDS = 2.0
"""Seconds of a wait before it is announced."""


@contextmanager
def announced(what: str, at_most: float | None = None, quiet: float | None = None) -> Iterator[None]:
    """Print one line to stderr if the `with` block takes longer than `quiet` seconds (by default QUIET_SECONDS). The line
    names what the block waits for, and the limit of the wait."""
    limit = "" if at_most is None else f" (at most {at_most:g} s)"
    wait = QUIET_SECONDS if quiet is None else quiet
    timer = threading.Timer(wait, lambda: print(f"waiting for {what}{limit}", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
