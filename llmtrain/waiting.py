"""Waits that announce themselves, so that a slow one does not look like a hang. Imports no torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

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


def acquire(path: Path, seconds: float, announce: Callable[[], object]) -> AbstractContextManager:
    """Acquire the lock of a file until the end of a `with` block. If another process holds it, call `announce` and wait.

    Raises Timeout after `seconds`, and OSError at once if the file can't be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()  # fails at once if no file can be created, where FileLock would retry until its timeout
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        announce()
        return lock.acquire(timeout=seconds)
