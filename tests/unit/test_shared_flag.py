"""Tests of the flag that any rank can raise: all ranks see it, and its thread ends with its context."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from llmtrain.parallel import shared_flag as module
from llmtrain.parallel.shared_flag import shared_flag


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let ranks poll the flag without pauses."""
    monkeypatch.setattr(module, "POLL_SECONDS", 0.0)
    yield


class SlowStore:
    """A store that answers a request only when it is told to."""

    def __init__(self) -> None:
        self.asked, self.answer = threading.Event(), threading.Event()

    def clone(self) -> SlowStore:
        return self

    def check(self, keys: list[str]) -> bool:
        self.asked.set()
        self.answer.wait(60)
        return False


def test_a_flag_raised_on_one_rank_is_seen_on_all() -> None:
    store = dist.TCPStore("localhost", 0, None, True, timeout=timedelta(seconds=60), wait_for_workers=False)
    raised = threading.Event()
    with (
        shared_flag(store, "stop", raised.is_set) as here,
        shared_flag(store, "stop", lambda: False) as elsewhere,
        shared_flag(store, "another", lambda: False) as other,
    ):
        assert not here() and not elsewhere()
        raised.set()
        for _ in range(6000):
            if here() and elsewhere():
                break
            threading.Event().wait(0.01)
        assert here() and elsewhere() and not other()


def test_the_flag_ends_with_its_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that returned from the store during the interpreter's shutdown aborted the process. Here, the store answers only
    once the thread is joined."""
    store, join = SlowStore(), threading.Thread.join

    def answer_and_join(thread: threading.Thread, timeout: float | None = None) -> None:
        store.answer.set()
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", answer_and_join)
    with shared_flag(store, "slow", lambda: False):
        assert store.asked.wait(60)
    assert "polls slow" not in [thread.name for thread in threading.enumerate()]
