"""Signals that ask a run to stop: blocking them for child processes, and noticing them while torch's code runs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that a user, a scheduler or a launcher sends to the processes of a run, often to all of them."""


@contextmanager
def blocked_stop_signals() -> Iterator[None]:
    """Block STOP_SIGNALS in this thread. Processes that it starts within the `with` block never get them. This process does, on
    another thread if it has one, else at the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def signals_noticed(notice: Callable[[int], object]) -> Iterator[None]:
    """Call `notice(number)` on another thread as soon as a signal with a Python handler arrives. Its handler can run much later, because
    the main thread runs handlers only between bytecodes, and never while it waits in torch's code. Only for the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def read() -> None:
        while numbers := os.read(reader, 64):
            for number in numbers:
                notice(number)
        os.close(reader)

    threading.Thread(target=read, daemon=True, name="notices signals").start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
