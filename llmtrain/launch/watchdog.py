"""Watchdog that kills ranks that cannot end by themselves, or that the user no longer waits for.

It kills frozen ranks after other ranks of this node have ended, and all remaining ranks after another node's ranks have
failed. torchrun would wait 30 seconds for frozen ranks, and does not know about other nodes. After a second Ctrl-C, the
watchdog kills all ranks of this node, where torchrun would signal them once more and wait. A second signal of another
kind is ignored, because torchrun would then end the ranks before their checkpoint is complete.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

from llmtrain.errors import FAILED
from llmtrain.train.signals import handled

POLL_SECONDS = 0.5
PATIENCE_SECONDS = 3.0
"""Seconds that ranks may take to end by themselves after other ranks have ended or failed."""
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""Signals that are forwarded to the ranks: torchrun's defaults except SIGINT, and the one that Slurm sends before the time limit."""


@contextmanager
def kill_hung_ranks(failed_elsewhere: Callable[[], bool]) -> Iterator[None]:
    """Watch the processes that this process starts within the `with` block, and kill hung ranks. A thread polls
    `failed_elsewhere()`, which returns whether ranks of another node have failed."""
    over, others = threading.Event(), set(psutil.Process().children())
    watch = threading.Thread(target=_watch, args=(over, others, failed_elsewhere), daemon=True, name="ends hung ranks")
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join(2 * POLL_SECONDS)


def _watch(over: threading.Event, others: set[psutil.Process], failed_elsewhere: Callable[[], bool]) -> None:
    launcher, ranks = psutil.Process(), set()
    ended_at = None
    while not over.wait(POLL_SECONDS):
        ranks |= _ranks_below(launcher, others)
        living = [rank for rank in ranks if _state(rank) not in (None, psutil.STATUS_ZOMBIE)]
        elsewhere = failed_elsewhere()
        if len(living) == len(ranks) and not elsewhere:
            ended_at = None
            continue
        ended_at = ended_at or time.monotonic()
        if time.monotonic() - ended_at < PATIENCE_SECONDS:
            continue
        for rank in living:
            if elsewhere or _state(rank) == psutil.STATUS_STOPPED:
                with suppress(psutil.NoSuchProcess):
                    rank.kill()


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Raise torchrun's SignalException on the first signal within the `with` block, and on the same signal again, so
    that torchrun forwards it to the ranks. Ignore later signals of other kinds. A second Ctrl-C (SIGINT) kills this
    node's ranks, a third also ends this process. Yields a function that returns whether Ctrl-C has killed the ranks."""
    from torch.distributed.elastic.multiprocessing import SignalException

    others, interrupts = set(psutil.Process().children()), itertools.count(1)
    first: list[int] = []
    are_killed = False

    def stop(number: int, frame: FrameType | None) -> None:
        if first and number != first[0]:
            return
        first.append(number)
        sent = signal.SIGTERM if number == signal.SIGINT else signal.Signals(number)
        raise SignalException(f"got {signal.Signals(number).name}", sent)

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal are_killed
        count = next(interrupts)
        if count == 1:
            _say("stopping within two log lines, with a checkpoint; Ctrl-C again ends all ranks at once")
            stop(number, frame)
            return
        _say("all ranks of this node are killed at once; the last complete checkpoint is kept")
        are_killed = True
        for rank in _ranks_below(psutil.Process(), others):
            with suppress(psutil.NoSuchProcess):
                rank.kill()
        if count > 2:
            os._exit(FAILED)

    with handled(FORWARDED, stop), handled([signal.SIGINT], interrupt):
        yield lambda: are_killed


def _say(text: str) -> None:
    with suppress(OSError):  # Ctrl-C also ends `tee`
        os.write(2, f"\n{text}\n".encode())  # print is not safe in a signal handler


def _ranks_below(launcher: psutil.Process, others: set[psutil.Process]) -> set[psutil.Process]:
    """Return the ranks of a launcher, which spawns them itself or lets the rank server fork them. `others` are the
    launcher's other children, such as that server."""
    spawned = _children(launcher) - others
    return spawned | {rank for other in others for rank in _children(other)}


def _children(process: psutil.Process) -> set[psutil.Process]:
    try:
        return set(process.children())
    except psutil.NoSuchProcess:
        return set()


def _state(process: psutil.Process) -> str | None:
    """Return `zombie`, `stopped`, ..., or None if the process no longer exists."""
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return None
