"""Tests of threads that take turns: one runs at a time, each has its own generators and timers, and all end when one fails."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from llmtrain.errors import TrainingError
from llmtrain.parallel.device_time import DeviceTimer
from llmtrain.train.metric_gather import IntervalMetrics
from llmtrain.train.metrics import Metrics
from llmtrain.turns import Turns, join, let_others_run


def meet(turns: Turns, arrived: set[int], number: int) -> None:
    """Wait until all threads have arrived."""
    with turns.changed:
        arrived.add(number)
        turns.changed.notify_all()
    turns.wait_for(lambda: len(arrived) == turns.count, lambda: "the others")


def test_one_thread_runs_at_a_time() -> None:
    turns, running, seen = Turns(4, 10.0), [], []
    points = [set() for _ in range(5)]

    def work(number: int) -> int:
        for point in points:
            running.append(number)
            time.sleep(0.001)  # a thread without the turn would get in here
            seen.append(tuple(running))
            running.remove(number)
            meet(turns, point, number)
        return number

    assert turns.run(work) == [0, 1, 2, 3]
    assert len(seen) == 20 and all(len(together) == 1 for together in seen)


def test_each_thread_has_its_own_random_numbers() -> None:
    turns, points = Turns(3, 10.0), [set() for _ in range(4)]

    def draw(number: int) -> list[float]:
        torch.manual_seed(number)
        drawn = []
        for point in points:
            drawn.append(torch.rand(()).item())
            meet(turns, point, number)
        return drawn

    drawn = turns.run(draw)
    for number in range(3):
        torch.manual_seed(number)
        assert drawn[number] == [torch.rand(()).item() for _ in points]


def test_the_first_error_ends_all_and_is_raised() -> None:
    turns, point = Turns(3, 10.0), set()

    def work(number: int) -> None:
        if number == 2:
            raise ValueError("two")
        meet(turns, point, number)

    with pytest.raises(ValueError, match="two"):
        turns.run(work)
    assert turns.stopped == "replica 2 has failed"


def test_a_wait_for_something_that_nobody_brings_ends_and_says_for_what() -> None:
    turns = Turns(2, 0.05)

    def work(number: int) -> None:
        if number == 0:
            turns.wait_for(lambda: False, lambda: "Godot")

    with pytest.raises(TrainingError, match=r"waited 0\.05 s \(run\.timeout_seconds\) for Godot"):
        turns.run(work)


def test_the_time_in_which_others_run_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thread waits far longer than its limit, but another thread has the turn."""
    turns, point, now = Turns(2, 10.0), set(), 0.0
    monkeypatch.setattr("llmtrain.turns.time", SimpleNamespace(monotonic=lambda: now))

    def work(number: int) -> None:
        nonlocal now
        if number == 1:
            now += 100.0
        meet(turns, point, number)

    turns.run(work)


def test_timers_stand_still_while_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, points, now = Turns(3, 10.0), [set(), set()], 0.0
    monkeypatch.setattr("llmtrain.turns.time", SimpleNamespace(monotonic=lambda: now))

    def work(number: int) -> float:
        nonlocal now
        timer = DeviceTimer()
        with timer.measure():
            for point in points:
                now += 10.0**number
                meet(turns, point, number)
        return timer.seconds

    assert turns.run(work) == [2, 20, 200]


def test_a_step_takes_the_time_of_its_own_replica_and_the_run_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, points, now = Turns(2, 10.0), [set(), set()], 0.0
    monkeypatch.setattr("llmtrain.turns.time", SimpleNamespace(monotonic=lambda: now))

    def work(number: int) -> tuple[float, float]:
        nonlocal now
        all_ranks = SimpleNamespace(shares_memory=True, size=2)
        metrics = SimpleNamespace(
            interval=IntervalMetrics(), train_seconds=0.0, mesh=SimpleNamespace(all_ranks=all_ranks)
        )
        with Metrics.training_time(metrics):
            for point in points:
                now += 10.0**number
                meet(turns, point, number)
        return metrics.interval.step_seconds, metrics.train_seconds

    assert turns.run(work) == [(2, 4), (20, 40)]


def test_other_threads_can_wait_too_and_work_of_theirs_is_waited_for() -> None:
    """Each replica has a thread that writes its checkpoints, and these threads wait for each other."""
    turns, point = Turns(2, 10.0), set()

    def work(number: int) -> bool:
        writer = threading.Thread(target=meet, args=(turns, point, number))
        writer.start()
        with let_others_run():
            writer.join(10.0)
        return not writer.is_alive()

    assert turns.run(work) == [True, True]


def test_the_wait_for_another_thread_does_not_count_while_somebody_works(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, release, now = Turns(2, 10.0), threading.Event(), 0.0
    monkeypatch.setattr("llmtrain.turns.time", SimpleNamespace(monotonic=lambda: now))

    def work(number: int) -> bool:
        nonlocal now
        if number == 1:
            now += 100.0  # while this thread has the turn
            release.set()
            return True
        other = threading.Thread(target=release.wait, daemon=True)
        other.start()
        join(other, 10.0)
        return not other.is_alive()

    assert turns.run(work) == [True, True]


def test_the_wait_for_another_thread_has_an_end() -> None:
    turns, release = Turns(1, 10.0), threading.Event()

    def work(number: int) -> bool:
        other = threading.Thread(target=release.wait, daemon=True)
        other.start()
        join(other, 0.05)
        return other.is_alive()

    assert turns.run(work) == [True]
    release.set()


def test_without_turns_nothing_is_left_to_others() -> None:
    with let_others_run():
        pass
    timer = DeviceTimer()
    with timer.measure():
        pass
    assert 0 <= timer.seconds < 1
