"""Folder lock: one process at a time, because two processes that write the same run would destroy each other's
files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from llmtrain.errors import RecipeError

PATIENCE_SECONDS = 10.0
"""Seconds to wait for a process that is about to end."""


def lock_folder(folder: Path, otherwise: str) -> FileLock:
    """Lock a folder until the returned lock is deleted or the process ends, however it ends.

    Raises RecipeError, which suggests `otherwise`, if another process holds the lock. Raises OSError if the
    folder can't be written. File systems without locks offer no such protection.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    with suppress(NotImplementedError):
        try:
            lock.acquire(timeout=PATIENCE_SECONDS)
        except Timeout:
            raise RecipeError(f"another process works in {folder}; wait until it has ended, or {otherwise}") from None
    return lock
