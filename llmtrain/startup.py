"""Startup helpers: imports without the garbage collector and without threads, and the time since the command was started."""

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
    A rank sets its own number of threads (`forked_rank`)."""
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


def import_transformers() -> None:
    """Import transformers without two parts that training never uses, and that take a quarter of the time of all imports
    before the first step.

    Its package of models would read all of its 1,600 files, as transformers itself has just done, to know which class is
    where; transformers is asked instead. Its losses for object detection would import scipy.
    """
    from unittest.mock import patch  # imports asyncio, which would delay --help

    import transformers.utils

    models = importlib.util.module_from_spec(importlib.util.find_spec("transformers.models"))
    models.__getattr__ = partial(getattr, transformers)
    sys.modules.setdefault("transformers.models", models)
    with patch.object(transformers.utils, "is_scipy_available", lambda: False):
        import transformers.modeling_utils  # noqa: F401
