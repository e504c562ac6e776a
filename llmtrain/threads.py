"""Background threads: their current GPU, requests to the job's store, and work on the newest of several steps."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

LAST_ANSWER_SECONDS = 5.0
"""Maximum seconds that `store_thread` waits at its end for the store's answer to the request in flight."""


def with_current_device(work: Callable[[], None]) -> Callable[[], None]:
    """Return `work` bound to the current GPU, for execution in another thread.

    A new thread defaults to GPU 0. Its first CUDA call there would take several hundred megabytes, for each rank of the node.
    """
    if not torch.cuda.is_available():
        return work
    device = torch.cuda.current_device()

    def there() -> None:
        torch.cuda.set_device(device)
        work()

    return there


@contextmanager
def store_thread(name: str, ask: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `ask`, which makes requests to a store, in a thread. At the end of the `with` block, set the event that was
    passed to `ask`, and wait briefly for the thread."""
    closed = threading.Event()
    thread = threading.Thread(target=ask, args=(closed,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join(LAST_ANSWER_SECONDS)  # an answer that arrives during the interpreter's shutdown aborts the process


class LatestStepWorker:
    """Background thread that works on one step at a time. Of the steps that are submitted meanwhile, it works on the
    newest one next and drops the others."""

    def __init__(self, work: Callable[[int], None], name: str):
        self._work, self._name = work, name
        self._lock = threading.Lock()
        self._running: int | None = None
        self._waiting: int | None = None
        self._thread: threading.Thread | None = None

    @property
    def has_started(self) -> bool:
        """Return whether a step was ever submitted."""
        return self._thread is not None

    @property
    def running(self) -> int | None:
        """Return the step that the thread works on, or None."""
        return self._running

    def submit(self, step: int) -> tuple[int | None, int | None]:
        """Queue `step`. Returns immediately, with the step that is running and the waiting step that `step` replaces,
        each None if there is none."""
        with self._lock:
            running, replaced = self._running, self._waiting
            if running is None:
                self._running = step
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            else:
                self._waiting = step
        return running, replaced

    def pending_steps(self) -> set[int]:
        """Return the running step and the waiting step, if any. Thread-safe."""
        with self._lock:
            return {step for step in (self._running, self._waiting) if step is not None}

    def join(self, seconds: float = 0.0) -> bool:
        """Wait for at most `seconds` until the thread has worked on all steps. Return whether it has."""
        if self._thread is not None:
            self._thread.join(max(0.0, seconds))
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        step = self._running
        while step is not None:
            try:
                self._work(step)
            except Exception:  # a later step may succeed
                traceback.print_exc()
            finally:
                with self._lock:  # after its release, if no step is running, `submit` starts another thread
                    step = self._running = self._waiting
                    self._waiting = None
