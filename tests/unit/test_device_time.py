"""Tests of times on a GPU, which are measured in its stream and not with the host's clock.

The streams and the host's clock are emulated. Time passes only where a test says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from llmtrain.parallel.collectives import PendingCollective
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.device_time import MAX_PENDING, DeviceTimer, clock_of
from llmtrain.parallel.engine import Engine
from llmtrain.sync.block_sync import BlockSync
from llmtrain.sync.sync_stats import SyncStats
from llmtrain.trace import host_mark, open_trace, span, step_span
from tests.emulated_gpu import streams
from tests.emulated_gpu.streams import HostClock, names_of_streams

GPU, CPU = torch.device("cuda"), torch.device("cpu")
UNIX = 1e9
"""Unix time at which a test begins."""


@pytest.fixture
def clock() -> Iterator[HostClock]:
    """Emulate streams and the host's clock, and yield the clock."""
    clock = HostClock(lambda: 0.0)
    patched = {"time": lambda: UNIX + clock(), "monotonic": clock}
    with (
        mock.patch.multiple(torch.cuda, **names_of_streams(lambda: GPU, clock)),
        mock.patch("llmtrain.parallel.device_time.time", SimpleNamespace(**patched)),
        mock.patch("llmtrain.turns.time", SimpleNamespace(**patched)),
        mock.patch("llmtrain.trace.time", SimpleNamespace(**patched)),
    ):
        yield clock


@pytest.fixture
def heard(clock: HostClock) -> Iterator[list[str]]:
    """Yield a list to which each use of a stream or an event is added."""
    heard: list[str] = []

    def hear(what: str, *_: Any) -> None:
        heard.append(what)

    streams.listeners.append(hear)
    yield heard
    streams.listeners.remove(hear)


def compute(seconds: float) -> None:
    """Enqueue work in the current stream."""
    torch.cuda.current_stream().occupy(seconds)


class NcclWork:
    """Message of NCCL, in a stream of its own. `wait` makes the current stream wait, and not the host. The future's callback is called
    at once, in a stream that waits for the message."""

    def __init__(self, stream: Any, seconds: float):
        stream.wait_stream(torch.cuda.current_stream())
        stream.occupy(seconds)
        self._done = stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)

    def get_future(self) -> NcclWork:
        return self

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_event(self._done)
        with torch.cuda.stream(stream):
            callback(self)


class GlooWork(NcclWork):
    """Message of gloo, for which the host waits. The callback is called at the end of the wait."""

    def __init__(self, clock: HostClock, seconds: float):
        self._clock, self._arrives_at = clock, clock() + seconds
        self._callback: Callable[[object], None] = lambda future: None

    def wait(self) -> None:
        self._clock.wait_until(self._arrives_at)
        self._callback(self)

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self._callback = callback


def send(comms: Comms, work: Callable[[], NcclWork], what: str = "synchronizing layer 0") -> PendingCollective:
    tensor = torch.zeros(1)
    return PendingCollective(comms, what, comms.start_work(what, 4.0, lambda *_, **__: work(), tensor), tensor)


def over_gloo() -> Comms:
    """Return the communicator of a rank on a GPU whose messages gloo sends."""
    with mock.patch.multiple(
        torch.distributed, get_backend=lambda group: "gloo", get_world_size=lambda group: 2, get_rank=lambda group: 0
    ):
        return Comms(mock.sentinel.group, GPU)


# ---- seconds


def test_a_stream_waits_and_the_host_does_not(clock: HostClock, heard: list[str]) -> None:
    comms, network = Comms(None, GPU), torch.cuda.Stream()
    compute(1.0)
    message = send(comms, lambda: NcclWork(network, 3.0))
    compute(0.5)  # hides 0.5 s of the message
    message.wait()
    assert clock() == 0.0 and "host waits" not in heard, "the host has not waited"
    assert comms.traffic.waiting.seconds == 0.0, "the stream has not reached the wait yet"
    clock.advance(10.0)
    assert comms.traffic.waiting.seconds == 2.5
    assert "host waits" not in heard


@pytest.mark.parametrize(
    ("busy", "waited", "stood_still"),
    [(0.0, 3.0, 3.0), (1.0, 3.0, 2.0), (5.0, 3.0, 0.0)],
    ids=["an idle stream", "a stream behind the host", "a stream busy all the time"],
)
def test_the_host_waits_with_gloo(clock: HostClock, busy: float, waited: float, stood_still: float) -> None:
    comms = over_gloo()
    compute(busy)
    send(comms, lambda: GlooWork(clock, waited)).wait()
    clock.advance(10.0)
    assert comms.traffic.waiting.seconds == stood_still


def test_what_a_synchronization_does_is_exposed_and_what_was_computed_before_is_not(clock: HostClock) -> None:
    comms, network = Comms(None, GPU), torch.cuda.Stream()
    stats = BlockSync(None, comms, Comms(None), None, None, None, None).stats
    compute(4.0)
    with stats.time_exposed():
        compute(0.25)
        with stats.time_waiting():
            send(comms, lambda: NcclWork(network, 3.0)).wait()
        compute(0.5)
    compute(4.0)
    assert (stats.exposed_seconds, stats.wait_seconds) == (0.0, 0.0)
    clock.advance(100.0)
    assert (stats.exposed_seconds, stats.wait_seconds) == (3.75, 3.0)


def test_gradients_that_are_averaged_late_are_waited_for_by_the_stream(clock: HostClock) -> None:
    engine, network = SimpleNamespace(gradient_wait=DeviceTimer(GPU)), torch.cuda.Stream()
    compute(1.0)
    message = send(Comms(None, GPU), lambda: NcclWork(network, 3.0))
    with Engine.time_gradient_wait(engine):
        message.wait()
    clock.advance(10.0)
    assert engine.gradient_wait.seconds == 3.0


@pytest.mark.parametrize("device", [None, CPU])
def test_on_a_cpu_the_thread_is_timed(clock: HostClock, heard: list[str], device: torch.device | None) -> None:
    timer = DeviceTimer(device)
    with timer.measure():
        clock.advance(2.0)
    assert timer.seconds == 2.0
    assert not heard


def test_communicators_of_other_threads_time_the_thread(clock: HostClock, heard: list[str]) -> None:
    comms = Comms(None)
    send(comms, lambda: GlooWork(clock, 3.0)).wait()
    assert comms.traffic.waiting.seconds == 3.0
    assert not heard


def test_a_failure_is_not_timed(clock: HostClock) -> None:
    timer = DeviceTimer(GPU)
    with pytest.raises(KeyError), timer.measure():
        raise KeyError
    with timer.measure():
        compute(1.0)
    clock.advance(1.0)
    assert timer.seconds == 1.0


# ---- sections that the stream has not completed


def test_events_are_used_again(clock: HostClock, heard: list[str]) -> None:
    timer = DeviceTimer(GPU)
    for _ in range(100):
        with timer.measure():
            compute(1.0)
        clock.advance(2.0)
    assert timer.seconds == 100.0
    assert heard.count("event made") <= 4


def test_a_stream_that_is_far_behind_is_waited_for(clock: HostClock, heard: list[str]) -> None:
    """The host waits only for the oldest section, which ends long before the stream is idle."""
    timer, extra = DeviceTimer(GPU), 10
    for _ in range(MAX_PENDING):
        with timer.measure():
            compute(1.0)
    assert "host waits" not in heard
    for _ in range(extra):
        with timer.measure():
            compute(1.0)
    assert clock() == extra
    assert heard.count("event made") <= 2 * (MAX_PENDING + 1)
    clock.advance(MAX_PENDING)
    assert timer.seconds == MAX_PENDING + extra


def test_a_checkpoint_has_what_is_known_and_the_rest_is_counted_later(clock: HostClock, heard: list[str]) -> None:
    stats = SyncStats(GPU)
    with stats.time_exposed():
        compute(1.0)
    clock.advance(1.0)
    with stats.time_exposed():
        compute(3.0)
    stored = stats.state_dict()
    assert stored["exposed_seconds"] == 1.0 and "host waits" not in heard
    clock.advance(3.0)
    assert stats.exposed_seconds == 4.0
    resumed = SyncStats(GPU)
    resumed.load_state_dict(stored)
    assert resumed.exposed_seconds == 1.0
    assert resumed.state_dict() == stored


def test_what_was_timed_before_a_checkpoint_is_loaded_is_dropped(clock: HostClock) -> None:
    comms = Comms(None, GPU)
    send(comms, lambda: NcclWork(torch.cuda.Stream(), 3.0)).wait()
    comms.traffic.load(bytes=8.0, seconds=1.5)
    clock.advance(10.0)
    assert comms.traffic.state_dict() == {"bytes": 8.0, "seconds": 1.5}


# ---- timelines


def spans(path: Path, kind: str) -> list[tuple[float, float]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["start"] - UNIX, line["end"] - UNIX) for line in lines if line["kind"] == kind]


def test_a_message_of_nccl_is_as_long_as_in_its_stream(clock: HostClock, heard: list[str], tmp_path: Path) -> None:
    path, comms, network = tmp_path / "rank.jsonl", Comms(None, GPU), torch.cuda.Stream()
    with open_trace(path, first=1, last=1, clock=clock_of(GPU)):
        with step_span(1):
            heard.clear()
            compute(1.0)
            messages = [send(comms, lambda: NcclWork(network, 3.0)) for _ in range(2)]
            with span("exposed"):
                for message in messages:
                    message.wait()
        assert clock() == 0.0 and "host waits" not in heard
        assert path.read_text() == "", "the stream has not reached the messages yet"
        clock.advance(5.0)
        with step_span(2):
            assert spans(path, "message") == [(1.0, 4.0)]
        clock.advance(5.0)
    assert spans(path, "message") == [(1.0, 4.0), (1.0, 7.0)]
    assert spans(path, "exposed") == [(1.0, 7.0)]
    assert spans(path, "step") == [(0.0, 7.0)]


def test_a_message_of_gloo_ends_when_it_is_complete(clock: HostClock, tmp_path: Path) -> None:
    path, comms = tmp_path / "rank.jsonl", over_gloo()
    with open_trace(path, first=1, last=1, clock=clock_of(GPU)), step_span(1):
        compute(8.0)
        send(comms, lambda: GlooWork(clock, 3.0)).wait()
    assert spans(path, "message") == [(0.0, 3.0)]


def test_what_the_device_has_not_done_by_the_end_is_not_written(clock: HostClock, tmp_path: Path) -> None:
    path = tmp_path / "rank.jsonl"
    with open_trace(path, first=1, last=1, clock=clock_of(GPU)), step_span(1):
        compute(1.0)
    assert path.read_text() == ""


def test_the_origin_is_read_without_waiting_for_training(clock: HostClock) -> None:
    compute(5.0)
    clock.advance(1.0)
    mark = clock_of(GPU)()
    assert clock() == 1.0 and mark() is None
    clock.advance(4.0)
    assert mark() == UNIX + 5.0


def test_timelines_of_a_cpu_are_the_hosts() -> None:
    assert clock_of(CPU) is host_mark
