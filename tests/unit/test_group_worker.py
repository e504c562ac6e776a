"""WAGMA's thread between two global averages: whose message it may answer with, when its own replica is slow to say where it is."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest
import torch

from llmtrain.parallel.comms import Comms
from llmtrain.sync.group_averager import GroupAverager

GLOBAL = 2
"""The iteration in which all replicas average."""


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


@pytest.fixture
def worker() -> Iterator[GroupAverager]:
    alone = Comms(None)
    made = GroupAverager(lambda iteration: alone, lambda i: i == GLOBAL, alone, Announced(), None, timeout_seconds=30)
    made.start(0, -1, [torch.zeros(3)])
    yield made
    made.wake_signal.given.put(False)
    made.close()


def test_after_a_global_average_nobody_answers_with_what_is_older(worker: GroupAverager) -> None:
    """Another replica is done with it and begins the next iteration; this one has yet to post where it is."""
    for iteration in (0, 1):
        worker.publish(iteration, [torch.full((3,), 1.0 + iteration)])
        worker.wake_signal.given.put(True)
        (total,), version = worker.collect(iteration)
        assert version == iteration and total.tolist() == [1.0 + iteration] * 3
    worker.wake_signal.given.put(True)  # of iteration 3
    with worker._changed:
        came_early = worker._changed.wait_for(lambda: GLOBAL + 1 in worker._sums, timeout=0.2)
    assert not came_early, "it answered with a message that is relative to another anchor"
    worker.publish(GLOBAL, [torch.zeros(3)])
    (total,), version = worker.collect(GLOBAL + 1)
    assert version == GLOBAL and total.tolist() == [0.0] * 3


def test_a_late_replica_answers_with_its_newest_message(worker: GroupAverager) -> None:
    worker.publish(0, [torch.ones(3)])
    for iteration in (0, 1):
        worker.wake_signal.given.put(True)
        (total,), version = worker.collect(iteration)
        assert version == 0 and total.tolist() == [1.0] * 3


def test_a_run_may_end_before_a_global_average(worker: GroupAverager) -> None:
    """The thread has passed it over, and waits for the iteration after it."""
    for iteration in (0, 1):
        worker.publish(iteration, [torch.ones(3)])
        worker.wake_signal.given.put(True)
        worker.collect(iteration)
    worker.finish(GLOBAL)
    assert worker.wake_signal.ended == [GLOBAL + 1] and not worker.is_running
