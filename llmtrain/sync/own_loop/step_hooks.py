"""Hooks around an optimizer's step that run once per step, even where torch's own hooks run twice."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch


class StepHooks:
    """Hooks before and after each step of an optimizer.

    torch calls its hooks in the `step` of every class. If a subclass's `step` calls that of its base class, they run twice per step;
    these hooks run in the outermost call only.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        before: Callable[[torch.optim.Optimizer, Sequence[Any], Mapping[str, Any]], None],
        after: Callable[[], None],
    ):
        self._before, self._after = before, after
        # Call of `step` that torch's hooks are part of. A counter would not do: no hook runs after a step that has failed.
        self._call: FrameType | None = None
        # torch.compile would otherwise trace the communication, which is slow and has no benefit.
        enter, leave = torch.compiler.disable(self._enter), torch.compiler.disable(self._leave)
        self._handles = [optimizer.register_step_pre_hook(enter), optimizer.register_step_post_hook(leave)]

    def remove(self) -> None:
        """Remove the hooks."""
        self._call = None
        for handle in self._handles:
            handle.remove()

    def _enter(self, optimizer: torch.optim.Optimizer, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
        call = _caller()
        if not _is_inside(call, self._call):
            self._call = call
            self._before(optimizer, arguments, named)

    def _leave(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        if self._call is _caller():
            self._call = None
            self._after()


def _caller() -> FrameType | None:
    """Return the function call in which torch calls a hook (the innermost one of a function in torch's module of optimizers), or None
    if something else calls it."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != torch.optim.Optimizer.__module__:
        frame = frame.f_back
    return frame


def _is_inside(call: FrameType | None, outer: FrameType | None) -> bool:
    """Return whether `outer` is among the callers of `call`."""
    while outer is not None and call is not None:
        call = call.f_back
        if call is outer:
            return True
    return False
