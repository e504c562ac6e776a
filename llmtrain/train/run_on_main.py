"""Slow work on the main rank, for which the other ranks wait without hitting the collective timeout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from llmtrain.errors import UserError
from llmtrain.parallel.mesh import Mesh

LOOK_SECONDS = 2.0
"""Seconds between the messages in which the main rank reports that it is still working."""


def run_on_main(
    mesh: Mesh, what: str, work: Callable[[], Any], timeout_seconds: float, progress: Callable[[], int] = lambda: 0
) -> Any:
    """Run `work` on the main rank and return its result on every rank. Raises, on every rank, a UserError of `work`, or
    one that names `what` once `progress()` has not changed for `timeout_seconds`."""
    task = _MainRankTask(what, work, timeout_seconds, progress) if mesh.is_main else None
    while (answer := mesh.broadcast_from_main(lambda: task.look())) is None:
        pass
    return answer[0]


class _MainRankTask:
    def __init__(self, what: str, work: Callable[[], Any], timeout_seconds: float, progress: Callable[[], int]):
        self._what, self._work, self._timeout_seconds, self._progress = what, work, timeout_seconds, progress
        self._answer: tuple[Any] | None = None
        self._error: BaseException | None = None
        self._so_far, self._moved = progress(), time.monotonic()
        # A daemon, because hanging work must not keep the process alive after the run has given up on it.
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)
        self._thread.start()

    def look(self) -> tuple[Any] | None:
        """Wait at most `LOOK_SECONDS`, then return the result in a tuple, or None if `work` is still running.
        Raises the error of `work`, or UserError once `progress` has stalled for too long."""
        self._thread.join(min(LOOK_SECONDS, self._timeout_seconds))
        if not self._thread.is_alive():
            if self._error is not None:
                raise self._error
            return self._answer
        if (so_far := self._progress()) != self._so_far:
            self._so_far, self._moved = so_far, time.monotonic()
        elif time.monotonic() - self._moved > self._timeout_seconds:
            raise UserError(f"{self._what}: no answer for {self._timeout_seconds:g} s (run.timeout_seconds)")
        return None

    def _run(self) -> None:
        try:
            self._answer = (self._work(),)
        except BaseException as error:
            self._error = error
