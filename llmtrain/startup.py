"""Imports without the garbage collector: torch and transformers take two thirds of the time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """What is imported within lives as long as the process. The collector does not look through all of it again and again
    meanwhile, nor later, nor at the end."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
