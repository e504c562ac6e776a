"""Ranks that can't end by themselves are ended: a frozen one when others of this node have ended, and all that are left when
another node's have failed. torchrun would give the first 30 seconds, and knows nothing of the second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

POLL_SECONDS = 0.5
PATIENCE_SECONDS = 3.0
"""What ranks get to end by themselves once others have."""


@contextmanager
def kill_hung_ranks(failed_elsewhere: Callable[[], bool]) -> Iterator[None]:
    """Within it, processes that this one starts are watched. `failed_elsewhere()`: whether ranks of another node have
    failed; it is asked in a thread."""
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
    """`zombie`, `stopped`, ...; None once it is gone."""
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return None
