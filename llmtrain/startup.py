"""Startup helpers: imports without the garbage collector, and the time since the command was started."""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from llmtrain.errors import UserError

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
    try:
        began = float(os.environ.get(STARTED) or psutil.Process().create_time())
    except ValueError:
        began = math.nan
    if not math.isfinite(began):
        raise UserError(
            f"{STARTED}={os.environ[STARTED]!r} in the environment is not a time; unset it: launchers set it"
        )
    return time.time() - began
