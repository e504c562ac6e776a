"""torch.compile for functions of a run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from llmtrain.stop_signals import blocked_stop_signals

Compilable = TypeVar("Compilable", bound=Callable[..., Any])


def compiled(function: Compilable, **options: Any) -> Compilable:
    """Return torch.compile of `function` with its `options`, for a process that handles stop signals.

    The first call of a compiled function starts the processes in which Triton's kernels are compiled. A stop signal that a launcher
    or a scheduler sends to all processes of a run would end these processes, and the run would then wait forever for its next kernel.
    They are therefore started with stop signals blocked.
    """
    inner, is_first = torch.compile(function, **options), True

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_first
        if not is_first:
            return inner(*args, **kwargs)
        with blocked_stop_signals():
            result = inner(*args, **kwargs)
        is_first = False
        return result

    return call
