"""Watchdog that kills ranks that cannot end by themselves.

It kills frozen ranks after other ranks of this node have ended, and all remaining ranks after another node's have
failed. torchrun would give the former 30 seconds and does not know about the latter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

POLL_SECONDS = 0.5
PATIENCE_SECONDS = 3.0
"""Seconds that ranks have to end by themselves after others have ended or failed."""


@contextmanager
def kill_hung_ranks(failed_elsewhere: Callable[[], bool]) -> Iterator[None]:
    """Watch the processes that this one starts within the `with` block, and kill hung ranks. A thread calls
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
        ranks |= _children(launcher) - others  # spawned
        ranks |= {rank for other in others for rank in _children(other)}  # forked by the rank server
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
