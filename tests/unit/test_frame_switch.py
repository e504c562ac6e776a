"""Tests of the user-space switch of virtual clusters: when frames leave, through which port, and which are lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.compare.cluster import delaying, frame_switch
from llmtrain.compare.cluster import hosts as cluster
from llmtrain.compare.cluster.delaying import DelaySwitch
from llmtrain.compare.cluster.frame_switch import HEADER, AddressTable, Counters, DelayLine, Switch
from llmtrain.compare.cluster.hosts import virtual_cluster
from llmtrain.compare.cluster.limits import HostLimits
from llmtrain.errors import ClusterError

FIRST, SECOND, EVERYONE = b"\x02aaaaa", b"\x02bbbbb", b"\xff" * 6


def frame(destination: bytes, source: bytes) -> bytes:
    return bytes(HEADER) + destination + source + b"\x08\x00payload"


def test_a_frame_leaves_its_latency_after_it_arrived_and_in_order() -> None:
    line = DelayLine(latency_seconds=0.02)
    assert line.next_due == float("inf") and line.pop_due(100.0) == []
    assert line.push(1.0, b"a") and line.push(1.005, b"b") and line.push(1.03, b"c")
    assert line.next_due == pytest.approx(1.02)
    assert line.pop_due(1.0199) == []
    assert line.pop_due(1.026) == [(pytest.approx(1.02), b"a"), (pytest.approx(1.025), b"b")]
    assert line.next_due == pytest.approx(1.05)
    assert [kept for _, kept in line.pop_due(9.0)] == [b"c"] and line.next_due == float("inf")


def test_a_share_of_frames_is_lost_and_the_same_ones_every_time() -> None:
    def kept(loss: float, seed: int) -> list[bool]:
        line = DelayLine(0.0, loss, seed)
        found = [line.push(0.0, b"") for _ in range(10_000)]
        assert len(line.pop_due(0.0)) == sum(found)
        return found

    assert all(kept(0.0, 1))
    assert 9_850 < sum(kept(0.01, 1)) < 9_950
    assert kept(0.01, 1) == kept(0.01, 1) != kept(0.01, 2)


def test_each_seed_and_each_port_of_a_cluster_loses_other_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(command: list[str], **_: Any) -> None:
        asked.append(json.loads(command[-1]))
        raise InterruptedError

    def kept(seed: int) -> list[list[bool]]:
        with pytest.raises(InterruptedError):
            virtual_cluster([HostLimits(loss=0.5)] * 2, networks=2, seed=seed).__enter__()
        return [[line.push(0.0, b"") for _ in range(64)] for line in Switch(asked.pop())._lines]

    asked: list[Any] = []
    monkeypatch.setattr(cluster, "why_no_cluster", lambda: None)
    monkeypatch.setattr(cluster, "_new_cluster", lambda: nullcontext(("made", [])))
    monkeypatch.setattr(cluster, "run", lambda *_: "")
    monkeypatch.setattr(cluster, "_virtual_host", lambda _, __, number, *___: SimpleNamespace(name=f"host{number}"))
    monkeypatch.setattr(delaying, "subprocess", SimpleNamespace(Popen=start, PIPE=None))
    monkeypatch.setattr(frame_switch, "_packet_socket", lambda port: port)
    (first, second), (other, _) = kept(1), kept(2)
    assert kept(1) == [first, second] and len({tuple(each) for each in (first, second, other)}) == 3


def test_frames_go_where_their_destination_was_last_seen() -> None:
    table = AddressTable(ports=3)
    assert table.ports_for(frame(SECOND, FIRST), 0) == [1, 2]
    table.learn(frame(EVERYONE, SECOND), 2)
    assert table.ports_for(frame(SECOND, FIRST), 0) == [2]
    assert table.ports_for(frame(EVERYONE, SECOND), 2) == [0, 1]
    table.learn(frame(EVERYONE, SECOND), 1)
    assert table.ports_for(frame(SECOND, FIRST), 0) == [1]


@pytest.fixture
def program() -> Iterator[list[subprocess.Popen]]:
    started: list[subprocess.Popen] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def switch_of(program: list[subprocess.Popen], text: str) -> DelaySwitch:
    """Start a Python process that runs `text`, and return a switch that talks to it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    program.append(subprocess.Popen([sys.executable, "-S", "-c", text], **pipes))
    return DelaySwitch(program[-1])


def test_counters_are_asked_for(program: list[subprocess.Popen]) -> None:
    found = Counters(forwarded=7, lost=1)
    switch = switch_of(program, f"input(); print({json.dumps(asdict(found))!r}, flush=True); input()")
    assert switch.counters() == found


def test_a_process_that_is_gone_or_silent_is_named(
    program: list[subprocess.Popen], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = switch_of(program, "input(); raise SystemExit(3)")
    with pytest.raises(ClusterError, match=r"^the process that delays packets: expected a line, and got its end"):
        gone.counters()
    gone.process.wait(timeout=60)
    with pytest.raises(ClusterError, match=r"^the process that delays packets has ended \(exit code 3\)$"):
        gone.counters()
    monkeypatch.setattr(delaying, "ANSWER_SECONDS", 0.01)
    with pytest.raises(ClusterError, match=r"got nothing within 0 s; see its output$"):
        switch_of(program, "input(); input()").counters()
