"""One process at a time in a folder: two that write the same run would destroy each other's files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from llmtrain.errors import RecipeError

PATIENCE_SECONDS = 10.0
"""For one that is just ending."""


def lock_folder(folder: Path, otherwise: str) -> FileLock:
    """Make a folder this process's own, from now until the returned lock is gone or the process has ended, however.

    Raises RecipeError that says what to do `otherwise` if another process has it, OSError if the folder can't be written. File
    systems without locks have no such protection.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    with suppress(NotImplementedError):
        try:
            lock.acquire(timeout=PATIENCE_SECONDS)
        except Timeout:
            raise RecipeError(f"another process works in {folder}; wait until it has ended, or {otherwise}") from None
    return lock
