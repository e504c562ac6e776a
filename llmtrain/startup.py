"""The seconds before training: imports without the garbage collector, and how long ago the command was started."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

STARTED = "LLMTRAIN_STARTED"
"""Environment variable: when the launcher of this rank was started, in seconds since 1970."""


@contextmanager
def imports_without_gc() -> Iterator[None]:
    """Import without garbage collection, which would look through all modules again and again, now and at every later pass.

    torch and transformers take two thirds of the time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def note_command_start() -> None:
    """Tell processes that this one starts when it was started itself."""
    os.environ[STARTED] = str(psutil.Process().create_time())


def seconds_since_command() -> float:
    """Return the age of the launcher, or of this process if it was started without one."""
    return time.time() - float(os.environ.get(STARTED) or psutil.Process().create_time())
