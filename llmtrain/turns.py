"""Threads that take turns: one of them runs at a time, until it waits for the others.

With `parallel.in_process`, the replicas are such threads. They do not compete for the interpreter, the cores and the
caches. They may also use libraries that change state of the entire process for a moment: accelerate replaces a method of
nn.Module while it builds a model on the meta device. Each thread has its own state of torch's random number generators.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from llmtrain.errors import TrainingError

T = TypeVar("T")
JOIN_SECONDS = 5.0
"""Seconds that the first thread waits for each other thread to end after a failure. Also the interval at which `join` checks
whether a thread has the turn."""
_own = threading.local()
"""`turn`: this thread's `Turn`, if it takes turns."""


class Turns:
    """Threads that take turns. They are numbered from 0, which is the thread that calls `run`."""

    def __init__(self, count: int, timeout_seconds: float):
        """Prepare for `count` threads. A wait fails after `timeout_seconds` in which no thread has had the turn."""
        self.count, self.timeout_seconds = count, timeout_seconds
        self.changed = threading.Condition()
        """Lock for this object's attributes and for everything that `wait_for` conditions depend on. A thread that
        changes any of these must notify it."""
        self.stopped: str | None = None
        """Reason for which all waits fail from now on, or None."""
        self._holder: int | None = None
        self._queue = deque(range(count))
        self._idle_since = time.monotonic()
        self._errors: list[BaseException] = []

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Call `work(number)` in each of the threads, and return the results by number. Thread 0 is the caller. Raises
        the first error of any thread."""
        results: dict[int, T] = {}

        def take_part(number: int) -> None:
            _own.turn = turn = Turn(self, number)
            try:
                turn.take()
                results[number] = work(number)
            except BaseException as error:
                with self.changed:
                    self._errors.append(error)
                self.stop(f"replica {number} has failed")
            finally:
                turn.give()
                del _own.turn

        threads = [
            # Daemons, because work that hangs must not keep the process alive after the others have failed.
            threading.Thread(target=take_part, args=(number,), name=f"replica {number}", daemon=True)
            for number in range(1, self.count)
        ]
        for thread in threads:
            thread.start()
        take_part(0)
        for thread in threads:
            thread.join(JOIN_SECONDS if self._errors else None)
        if self._errors:
            raise self._errors[0]
        return [results[number] for number in range(self.count)]

    def stop(self, reason: str) -> None:
        """Make all present and later waits fail with `reason`. If called again, the first reason stays."""
        with self.changed:
            self.stopped = self.stopped or reason
            self.changed.notify_all()

    @property
    def idle_seconds(self) -> float:
        """Return the seconds since a thread last had the turn; 0 if a thread has it."""
        with self.changed:
            return 0.0 if self._holder is not None else time.monotonic() - self._idle_since

    def wait_for(self, is_met: Callable[[], bool], what: Callable[[], str]) -> None:
        """Let the other threads run until the condition is met. Any thread may call this, also one that takes no turns.
        `what()` names, in the error, what the thread waits for.

        Raises TrainingError if a thread has failed, or if none has had the turn for `timeout_seconds`.
        """
        if is_met():
            return
        with let_others_run(), self.changed:
            while not is_met():
                if self.stopped is not None:
                    raise TrainingError(self.stopped)
                if (left := self.timeout_seconds - self.idle_seconds) <= 0:
                    raise TrainingError(f"waited {self.timeout_seconds:g} s (run.timeout_seconds) for {what()}")
                self.changed.wait(left)

    def take(self, number: int) -> None:
        """Wait for the turn of thread `number`, and take it. Raises TrainingError if a thread has failed."""
        with self.changed:
            if number not in self._queue:  # at the start, all threads are queued
                self._queue.append(number)
            self.changed.wait_for(lambda: self.stopped or (self._holder is None and self._queue[0] == number))
            self._queue.remove(number)
            if self.stopped is not None:
                raise TrainingError(self.stopped)
            self._holder = number

    def give(self, number: int) -> None:
        """End the turn of thread `number`, if it has the turn. The next thread in the queue can then take it."""
        with self.changed:
            if self._holder == number:
                self._holder, self._idle_since = None, time.monotonic()
                self.changed.notify_all()


class Turn:
    """State of one thread of `turns` while another thread has the turn: the thread's random number generators, and its
    timers, which are stopped meanwhile."""

    def __init__(self, turns: Turns, number: int):
        self.turns, self.number = turns, number
        self.timers: list[tuple[Callable[[], None], Callable[[], None]]] = []
        """(begin, end) of each enclosing `in_own_turns`, outermost first."""
        self.away_seconds = 0.0
        """Seconds that this thread has been without the turn."""
        self._given_at = time.monotonic()
        self._generators: list[torch.Tensor] = []

    def take(self) -> None:
        """Wait for the turn and take it. Restore this thread's generators and begin its timers."""
        self.turns.take(self.number)
        self.away_seconds += time.monotonic() - self._given_at
        if self._generators:
            torch.set_rng_state(self._generators[0])
            for state in self._generators[1:]:
                torch.cuda.set_rng_state(state)
        for begin, _ in self.timers:
            begin()

    def give(self) -> None:
        """End this thread's timers, save its generators, and leave the turn to the next thread."""
        for _, end in reversed(self.timers):
            end()
        self._given_at = time.monotonic()
        self._generators = [torch.get_rng_state()]
        if torch.cuda.is_available():
            self._generators.append(torch.cuda.get_rng_state())
        self.turns.give(self.number)


@contextmanager
def let_others_run() -> Iterator[None]:
    """Leave the turn to other threads while the enclosed code waits. Do nothing in a thread that takes no turns. All code that
    waits for other replicas must be enclosed, or else wait with `Turns.wait_for`."""
    turn: Turn | None = getattr(_own, "turn", None)
    if turn is None:
        yield
        return
    turn.give()
    try:
        yield
    finally:
        turn.take()


def own_time() -> float:
    """Return this thread's monotonic time in seconds, which stands still while other threads have the turn."""
    turn: Turn | None = getattr(_own, "turn", None)
    return time.monotonic() - (0.0 if turn is None else turn.away_seconds)


def join(thread: threading.Thread, seconds: float) -> None:
    """Wait until `thread` has ended, and let other threads run until then. Give up after `seconds` in which no thread has
    had the turn."""
    turn: Turn | None = getattr(_own, "turn", None)
    if turn is None:
        thread.join(seconds)
        return
    with let_others_run():
        while thread.is_alive() and (left := seconds - turn.turns.idle_seconds) > 0:
            thread.join(min(left, JOIN_SECONDS))


@contextmanager
def in_own_turns(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Call `begin` before the enclosed code and `end` after it. Also call `end` each time this thread leaves the turn to
    others, and `begin` when it has the turn again. After an error in the enclosed code, `end` is not called."""
    turn: Turn | None = getattr(_own, "turn", None)
    timers = [] if turn is None else turn.timers
    begin()
    timers.append((begin, end))
    try:
        yield
    finally:
        timers.pop()
    end()
