"""Waits that announce themselves, so that a slow one does not look like a hang. Imports no torch."""

from __future__ import annotations

import errno
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

    Raises Timeout after `seconds`, and OSError at once if no file can be created. On a file system without locks
    (ENOSYS), newer versions of filelock use a file as the lock. If that fails, too, one printed line says that nothing
    is locked.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Fails at once if no file can be created; FileLock would retry until its timeout. The lock's own file must not be
    # created here: without flock, FileLock takes a file that it has not created for another process's lock.
    tempfile.TemporaryFile(dir=path.parent).close()
    lock = FileLock(path)
    with where_locks_exist(path.parent):
        try:
            return lock.acquire(timeout=0)
        except Timeout:
            announce()
            return lock.acquire(timeout=seconds)
    return nullcontext()


@contextmanager
def where_locks_exist(folder: Path) -> Iterator[None]:
    """Run the enclosed code, which locks a file in `folder`. If the file system has no locks, only print that nothing is locked."""
    try:
        yield
    except (NotImplementedError, OSError) as error:  # of older versions of filelock; of NFS without a lock server
        if isinstance(error, OSError) and error.errno != errno.ENOLCK:
            raise
        print(f"{folder} has no file locks: let one process at a time write there", file=sys.stderr, flush=True)
