"""Startup helpers: imports without the garbage collector, and the time since the command was started."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

STARTED = "LLMTRAIN_STARTED"
"""Environment variable with the start time of this rank's launcher, in seconds since 1970."""


@contextmanager
def imports_without_gc() -> Iterator[None]:
    """Disable garbage collection during imports, then exempt the imported objects from later collections.

    Importing torch and transformers then takes two thirds of the time, because no collection scans all modules.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def note_command_start() -> None:
    """Record this process's start time in the environment of the processes that it will start."""
    os.environ[STARTED] = str(psutil.Process().create_time())


def seconds_since_command() -> float:
    """Return the age in seconds of the launcher, or of this process if it was started without one."""
    return time.time() - float(os.environ.get(STARTED) or psutil.Process().create_time())
