"""Helpers for a fast start: imports without garbage collection, threads or unused parts, and the time since the command began."""

from __future__ import annotations

import gc
import importlib.util
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

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


@contextmanager
def single_threaded_imports() -> Iterator[None]:
    """Keep libraries that are imported within the `with` block from starting threads, so that this process can be forked.
    Each forked rank sets its own number of threads (`forked_rank`)."""
    # pyarrow, which other libraries may import, has a variable of its own.
    needed = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
    before = {name: os.environ.get(name) for name in needed}
    os.environ.update(needed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def note_command_start() -> None:
    """Record this process's start time in the environment of the processes that it will start."""
    os.environ[STARTED] = str(_start_time())


def seconds_since_command() -> float:
    """Return the age in seconds of the launcher, or of this process if it was started without one. Raises UserError if the
    environment has a start time that is not a number."""
    try:
        began = float(os.environ.get(STARTED) or _start_time())
    except ValueError:
        began = math.nan
    if not math.isfinite(began):
        raise UserError(
            f"{STARTED}={os.environ[STARTED]!r} in the environment is not a time; unset it: launchers set it"
        )
    return time.time() - began


def _start_time() -> float:
    """Return when this process was started, in seconds since 1970.

    On Linux, psutil computes this from a boot time that is cut to a whole second. The exact boot time is used here instead.
    """
    created = psutil.Process().create_time()
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return created
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + created - psutil.boot_time()


def import_transformers() -> None:
    """Import transformers without two parts that training never uses. This saves a sixth of the time of all imports.

    The first part is the package `transformers.models`. It would read its 1,600 files to find out which class is in which file,
    which transformers itself has just done. An empty module that forwards to transformers takes its place. The second part is
    scipy, which only losses for object detection need.
    """
    from unittest.mock import patch  # imports asyncio, which would delay --help

    import transformers.utils

    # A version of transformers that has no such package is imported in full.
    if (spec := importlib.util.find_spec("transformers.models")) is not None:
        models = importlib.util.module_from_spec(spec)
        models.__getattr__ = partial(getattr, transformers)
        sys.modules.setdefault(models.__name__, models)
    with patch.object(transformers.utils, "is_scipy_available", lambda: False, create=True):
        import transformers.modeling_utils
