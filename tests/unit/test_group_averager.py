"""WAGMA's thread between two global averages: whose message it may answer with, when its own replica is slow to say where it is."""

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
"""The iteration in which all replicas average."""
WAITS = "waits for its own replica"


class Announced:
    """An activation that the test gives."""

    def __init__(self) -> None:
        self.given: queue.Queue[bool] = queue.Queue()
        self.ended: list[int] = []

    def wait(self, iteration: int) -> bool:
        """False: there are no more."""
        return self.given.get(timeout=30)

    def announce(self, iteration: int) -> None:
        """The test does that."""

    def end(self, iteration: int) -> None:
        self.ended.append(iteration)
        self.given.put(False)


class Watched(threading.Condition):
    """A condition that notes in `happened` when a thread other than the test's begins to wait for it."""

    def __init__(self, happened: queue.Queue[int | str]) -> None:
        super().__init__()
        self.happened, self.of_test = happened, threading.current_thread()

    def wait(self, timeout: float | None = None) -> bool:
        if threading.current_thread() is not self.of_test:
            self.happened.put(WAITS)
        return super().wait(timeout)


@pytest.fixture
def happened() -> queue.Queue[int | str]:
    """Return iterations for which the thread has chosen a message, with `WAITS` whenever it waits before that."""
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
    """Another replica is done with it and begins the next iteration; this one has yet to post where it is."""
    for iteration in (0, 1):
        worker.publish(iteration, [torch.full((3,), 1.0 + iteration)])
        worker.wake_signal.given.put(True)
        (total,), version = worker.collect(iteration)
        assert version == iteration and total.tolist() == [1.0 + iteration] * 3
    worker.wake_signal.given.put(True)  # of iteration 3
    assert [happened.get(timeout=30) for _ in range(3)] == [0, 1, WAITS], (
        "it answered with a message that is relative to another anchor"
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
    """The message and the copy of it that is sent, as `models_in_cpu_memory` says."""
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
    """Also if all averages are global, and the thread never sends any."""
    worker.is_global = lambda iteration: True
    for iteration in range(5):
        worker.publish(iteration, [torch.zeros(3)])
    assert list(worker._posted) == [4]


def test_a_run_may_end_before_a_global_average(worker: GroupAverager) -> None:
    """The thread has passed it over, and waits for the iteration after it."""
    for iteration in (0, 1):
        worker.publish(iteration, [torch.ones(3)])
        worker.wake_signal.given.put(True)
        worker.collect(iteration)
    worker.finish(GLOBAL)
    assert worker.wake_signal.ended == [GLOBAL + 1] and not worker.is_running
