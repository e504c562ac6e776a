"""Flag that any rank can raise and all ranks soon see, without waiting for one another: a key in the job's store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist

from llmtrain.threads import store_thread

POLL_SECONDS = 0.5


@contextmanager
def shared_flag(store: dist.Store | None, name: str, raised_here: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """Provide a function that returns, without waiting, whether this rank knows that a rank has raised the flag.

    `raised_here()` returns whether this rank raises the flag, which then stays raised. A thread calls it every
    POLL_SECONDS, and polls the store over its own connection. Without a store, this process is the only rank.
    """
    if store is None:
        yield raised_here
        return
    raised = threading.Event()
    with store_thread(f"polls {name}", partial(_poll, store.clone(), f"flag/{name}", raised_here, raised)):
        yield raised.is_set


def _poll(
    store: dist.Store, key: str, raised_here: Callable[[], bool], raised: threading.Event, closed: threading.Event
) -> None:
    while not closed.wait(POLL_SECONDS):
        try:
            if raised_here():
                store.set(key, "raised")
            if store.check([key]):
                raised.set()
                return
        except dist.DistError:  # the store is gone; this rank's next collective says why
            return
