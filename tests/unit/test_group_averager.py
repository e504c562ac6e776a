"""Tests of WAGMA's background thread: which message it contributes, before and after a global average, if its replica is late."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
import torch

from llmtrain.config import WaitAvoidingSection
from llmtrain.parallel.comms import Comms
from llmtrain.sync.schedules import group_averager
from llmtrain.sync.schedules.group_averager import GroupAverager, copy_of

GLOBAL = 2
"""Iteration in which all replicas average."""
WAITS = "waits for its own replica"


class Announced:
    """Wake signal that the test gives."""

    def __init__(self) -> None:
        self.given: queue.Queue[bool] = queue.Queue()
        self.ended: list[int] = []

    def wait(self, iteration: int) -> bool:
        """Return what the test has given: True to start the iteration, False to end the thread."""
        return self.given.get(timeout=30)

    def announce(self, iteration: int) -> None:
        """Do nothing, because the test gives the signal."""

    def end(self, iteration: int) -> None:
        self.ended.append(iteration)
        self.given.put(False)


class Watched(threading.Condition):
    """Condition that notes in `happened` when a thread other than the test's begins to wait for it."""

    def __init__(self, happened: queue.Queue[int | str]) -> None:
        super().__init__()
        self.happened, self.of_test = happened, threading.current_thread()

    def wait(self, timeout: float | None = None) -> bool:
        if threading.current_thread() is not self.of_test:
            self.happened.put(WAITS)
        return super().wait(timeout)


@pytest.fixture
def happened() -> queue.Queue[int | str]:
    """Provide a queue of events of the thread: an iteration once its message is chosen, and `WAITS` whenever the thread waits."""
    return queue.Queue()


@pytest.fixture
def worker(happened: queue.Queue[int | str]) -> Iterator[GroupAverager]:
    alone = Comms(None)

    def group_of(iteration: int) -> Comms:
        happened.put(iteration)
        return alone

    made = GroupAverager(group_of, lambda i: i == GLOBAL, alone, Announced(), None, timeout_seconds=30)
    made._changed = Watched(happened)
    made.start(0, -1, [torch.zeros(3)])
    yield made
    made.wake_signal.given.put(False)
    made.close()


def test_after_a_global_average_nobody_answers_with_what_is_older(
    worker: GroupAverager, happened: queue.Queue[int | str]
) -> None:
    """Another replica has finished it and starts the next iteration. This replica has not yet published its message."""
    for iteration in (0, 1):
        worker.publish(iteration, [torch.full((3,), 1.0 + iteration)])
        worker.wake_signal.given.put(True)
        (total,), version = worker.collect(iteration)
        assert version == iteration and total.tolist() == [1.0 + iteration] * 3
    worker.wake_signal.given.put(True)  # for iteration 3
    assert [happened.get(timeout=30) for _ in range(3)] == [0, 1, WAITS], (
        "the thread contributed a message that is relative to another anchor"
    )
    worker.publish(GLOBAL, [torch.zeros(3)])
    (total,), version = worker.collect(GLOBAL + 1)
    assert version == GLOBAL and total.tolist() == [0.0] * 3
    assert happened.get(timeout=30) == GLOBAL + 1


def test_a_late_replica_answers_with_its_newest_message(worker: GroupAverager) -> None:
    worker.publish(0, [torch.ones(3)])
    for iteration in (0, 1):
        worker.wake_signal.given.put(True)
        (total,), version = worker.collect(iteration)
        assert version == 0 and total.tolist() == [1.0] * 3


def test_a_replica_in_time_keeps_two_models(worker: GroupAverager, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the message and the copy that is sent, as in `models_in_cpu_memory`."""
    kept = []

    def counting(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            kept.append(len(worker._posted) + 1)
        return copy_of(part, like)

    monkeypatch.setattr(group_averager, "copy_of", counting)
    for iteration in (0, 1):
        worker.publish(iteration, [torch.ones(3)])
        worker.wake_signal.given.put(True)
        worker.collect(iteration)
    assert kept == [WaitAvoidingSection.models_in_cpu_memory] * 2


def test_a_global_average_ends_the_use_of_older_messages(worker: GroupAverager) -> None:
    """This also holds if all averages are global, so that the thread never sends a message."""
    worker.is_global = lambda iteration: True
    for iteration in range(5):
        worker.publish(iteration, [torch.zeros(3)])
    assert list(worker._posted) == [4]


def test_a_run_may_end_before_a_global_average(worker: GroupAverager) -> None:
    """The thread has skipped the global average, and waits for the iteration after it."""
    for iteration in (0, 1):
        worker.publish(iteration, [torch.ones(3)])
        worker.wake_signal.given.put(True)
        worker.collect(iteration)
    worker.finish(GLOBAL)
    assert worker.wake_signal.ended == [GLOBAL + 1] and not worker.is_running
