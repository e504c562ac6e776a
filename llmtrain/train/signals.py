"""Stop requests from the operating system. A stop is `requested` on a rank that a signal has reached, and `seen` on the
ranks that know of it. It is agreed (`Metrics.stop_agreed`) once all ranks know of it at the same step, where they stop.

A second signal of the same kind ends the process at once. A different signal does not, because Slurm sends SIGUSR1 some time
before SIGTERM, and the checkpoint that SIGUSR1 started should be completed.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from llmtrain.errors import FAILED, is_local_rank_zero
from llmtrain.stop_signals import STOP_SIGNALS, signals_noticed

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Environment variable that torchrun sets for the processes that it starts."""
RUN = "LLMTRAIN_RUN"
"""Environment variable with the process id of a run, set for the run's background evaluation."""
WATCH_SECONDS = 2.0
"""Seconds between checks that a process still exists."""
SAME_REQUEST_SECONDS = 2.0
"""Interval within which equal signals count as one request, because the terminal and the launcher both forward a
single Ctrl-C."""


class StopRequest:
    """Request to stop a run. The same signal after `SAME_REQUEST_SECONDS` ends the process at once."""

    def __init__(self) -> None:
        self.requested = False
        """True once this process has been asked to stop."""
        self.seen: Callable[[], bool] = lambda: False
        """Function that returns whether this rank knows that any rank was asked; always False if ranks agree only at
        log lines."""
        self._asked_at = dict.fromkeys(STOP_SIGNALS, math.inf)

    @property
    def is_signaled(self) -> bool:
        """True once a stop signal has arrived, even if the main thread has not run `handle` yet."""
        return self.requested or any(map(math.isfinite, self._asked_at.values()))

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Set `requested`. Uses no collective and no lock, because a signal can arrive at any moment."""
        name = signal.Signals(number).name
        if not self.requested and TORCHRUN not in os.environ and is_local_rank_zero():  # a launcher says so itself
            again = f"another {name} ends this process at once"
            with suppress(OSError):  # the terminal may be gone
                os.write(2, f"{name}: stopping within two log lines, with a checkpoint; {again}\n".encode())
        self.requested = True

    def notice(self, number: int) -> None:
        """End the process if `number`, a signal that has just arrived, is a second request. Called on another thread than
        `handle`, which can run much later."""
        if number not in STOP_SIGNALS:
            return
        asked_at = self._asked_at[number]
        if time.monotonic() - asked_at > SAME_REQUEST_SECONDS:
            name = signal.Signals(number).name
            with suppress(OSError):
                os.write(2, f"a second {name}: stopped at once; the last complete checkpoint is kept\n".encode())
            os._exit(FAILED)
        self._asked_at[number] = min(asked_at, time.monotonic())


_installed: list[StopRequest] = []
"""Stop request whose handlers are installed; empty if none are."""


def request_stop() -> None:
    """Ask this process to stop, unless it was asked already: a second SIGTERM would end it at once."""
    if not any(stop.is_signaled for stop in _installed):
        os.kill(os.getpid(), signal.SIGTERM)


def stop_without_torchrun() -> None:
    """Make this process, if torchrun started it, stop with a checkpoint once torchrun is gone: killed, or out of
    memory. Nothing else would end the process, and it would keep its GPU and the run's lock."""
    if TORCHRUN in os.environ:
        parent = os.getppid()
        _stop_once_gone(lambda: os.getppid() == parent)


def stop_without_run() -> None:
    """Make this process, if it is a run's background evaluation, end once the run is gone, perhaps killed. Nothing else
    would end it."""
    if (pid := os.environ.get(RUN)) is None:
        return
    import psutil

    try:
        run = psutil.Process(int(pid))
    except psutil.NoSuchProcess:
        run = None
    _stop_once_gone(lambda: run is not None and run.is_running() and run.status() != psutil.STATUS_ZOMBIE)


def _stop_once_gone(is_there: Callable[[], bool]) -> None:
    def watch() -> None:
        while is_there():
            time.sleep(WATCH_SECONDS)
        request_stop()

    threading.Thread(target=watch, daemon=True, name="watches who started this").start()


def is_ignored(number: signal.Signals) -> bool:
    """Return whether this process was started with `number` ignored so that it outlives its terminal, as nohup does."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


@contextmanager
def handled(numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Let `handler` handle the signals that are not ignored. Restore the previous handlers on exit."""
    before = {number: signal.signal(number, handler) for number in numbers if not is_ignored(number)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Install handlers for stop requests, and restore the previous handlers on exit. Do nothing unless this is the main
    thread, because Python allows handlers only there. Without handlers, a stop is never requested.

    After an error, a rank of torchrun keeps its handlers until it ends: torchrun sends SIGTERM as soon as another rank has
    failed, and this one has yet to print its own error."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    _installed.append(request)
    try:
        with signals_noticed(request.notice), handled(STOP_SIGNALS, request.handle):
            yield request
    except BaseException:
        for number in STOP_SIGNALS if TORCHRUN in os.environ else ():
            if not is_ignored(number):
                signal.signal(number, request.handle)
        raise
    finally:
        _installed.remove(request)
