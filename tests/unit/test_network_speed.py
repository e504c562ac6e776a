"""The doctor's measurements of links, clocks and collectives between hosts and ranks, and its findings."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmtrain.doctor import network_speed, timed_connection
from llmtrain.doctor.finding import Level
from llmtrain.doctor.network_speed import (
    SECRET_BYTES,
    SHOWN,
    SMALLEST,
    Link,
    LinkServer,
    bench_collectives,
    links_between,
    measure_all,
    measure_link,
    slow_start,
    starts_slowly,
    tournament,
)
from llmtrain.parallel import network
from tests.unit.test_doctor import levels

SECRET = bytes(range(SECRET_BYTES))


@pytest.mark.parametrize("hosts", [2, 3, 4, 7, 8])
def test_every_pair_meets_once_and_nobody_twice_at_a_time(hosts):
    rounds = list(tournament(hosts))
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(hosts), 2))
    for pairs in rounds:
        busy = [host for pair in pairs for host in pair]
        assert len(busy) == len(set(busy))


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(network_speed, "LONG_ENOUGH", 0.01)
    running = LinkServer("127.0.0.1", SECRET, 60)
    yield running
    running.close()


def test_a_link_is_measured(server):
    link = measure_link(0, 1, "127.0.0.1", ("127.0.0.1", server.port), SECRET, 60)
    assert (link.here, link.there, link.error) == (0, 1, "")
    assert link.sent > 1e6 and link.received > 1e6
    assert 0 < link.milliseconds < 1000 and abs(link.skew) < 1


def test_a_clock_that_is_off_is_seen(server, monkeypatch):
    def clock() -> float:
        """Return the time, which is 100 s later for the server. The server runs in a thread of its own."""
        return 1100.0 if threading.current_thread() is not threading.main_thread() else 1000.0

    monkeypatch.setattr(
        network_speed, "time", SimpleNamespace(time=clock, perf_counter=network_speed.time.perf_counter)
    )
    link = measure_link(0, 1, "127.0.0.1", ("127.0.0.1", server.port), SECRET, 60)
    assert link.skew == pytest.approx(100, abs=1)


def test_clocks_are_compared_by_the_quickest_round_trip(server, monkeypatch) -> None:
    """The slower a round trip is, the more its two directions may differ."""
    pings = cycle([(0.5, 3.0), (0.01, 0.2), (0.8, -5.0)])
    monkeypatch.setattr(network_speed, "_ping", lambda connection: next(pings))
    monkeypatch.setattr(network_speed, "LONGEST_TRANSFER", 0.001)
    link = measure_link(0, 1, "127.0.0.1", ("127.0.0.1", server.port), SECRET, 60)
    assert (link.skew, link.milliseconds) == (0.2, pytest.approx(500))


def test_strangers_get_nothing_from_the_server(server):
    link = measure_link(0, 1, "127.0.0.1", ("127.0.0.1", server.port), bytes(SECRET_BYTES), 60)
    assert link.error and link.sent == 0


def test_a_host_that_is_not_there_is_an_error_within_the_timeout():
    with socket.socket() as taken:  # bound, so that nobody else gets the port, but not listening
        taken.bind(("127.0.0.1", 0))
        link = measure_link(0, 1, "127.0.0.1", taken.getsockname(), SECRET, 5)
    assert link.error == "Connection refused"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = measure_link(0, 1, "127.0.0.1", silent.getsockname(), SECRET, 0.3)
    assert link.error == "no answer in 0.3 s"


def test_a_link_that_trickles_is_measured_no_longer_than_one_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timed_connection, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = timed_connection.TimedConnection("127.0.0.1", server.getsockname(), 5)
        with connection.socket, server.accept()[0] as other:
            other.sendall(b"12")
            assert connection.recv(1) == b"1"
            now[0] = 4.0
            connection.sendall(b"3")
            assert connection.socket.gettimeout() == 1
            now[0] = 5.0
            with pytest.raises(TimeoutError):
                connection.recv(1)


def test_all_links_are_measured_between_two_hosts(monkeypatch):
    """Both hosts are threads of this process. Real hosts exchange values in a roll call."""
    monkeypatch.setattr(network_speed, "LONG_ENOUGH", 0.01)
    barrier, told = threading.Barrier(2), {}

    def host(me: int) -> list[Link]:
        def exchange(name, value):
            told[name, me] = value
            barrier.wait(100)
            return [told[name, 0], told[name, 1]]

        return measure_all(me, ["127.0.0.1", "127.0.0.1"], SECRET, 60, exchange)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(host, (0, 1))
    assert first == second and [(link.here, link.there, link.error) for link in first] == [(0, 1, "")]


THREE_HOSTS = ["node1 (10.0.0.1)", "node2 (10.0.0.2)", "node3 (10.0.0.3)"]


def link(here: int, there: int, rate: float = 1e8, skew: float = 0.0, error: str = "") -> Link:
    return Link(here, there, 0.5, rate, 2 * rate, skew, error)


def test_pairs_that_can_not_talk_are_named():
    found = links_between(THREE_HOSTS, [link(0, 1, error="timed out"), link(0, 2), link(1, 2)])
    assert levels(found) == ["problem", "ok", "ok", "ok"]
    assert found[0].what == "node2 (10.0.0.2) can't reach node1 (10.0.0.1): timed out"
    assert "MASTER_PORT" in found[0].advice
    assert levels(links_between(THREE_HOSTS, [link(0, 1, error="x")])) == ["problem"]


def test_a_slow_link_and_a_clock_that_is_off_are_warned_of():
    found = links_between(THREE_HOSTS, [link(0, 1), link(0, 2, rate=1e7), link(1, 2, skew=-3)])
    assert levels(found) == ["warning", "ok", "ok", "warning"]
    assert found[0].what.startswith("node3 (10.0.0.3) to node1 (10.0.0.1): 0.50 ms round trip, 10.0 MB/s sent")
    assert found[3].what == "the clock of node2 (10.0.0.2) is -3.0 s off that of node3 (10.0.0.3)"
    fine = links_between(THREE_HOSTS, [link(0, 1, skew=0.002)])
    assert fine[-1].what == "clocks agree to 2.0 ms"


def test_of_many_links_the_slowest_are_shown():
    found = links_between(list("abcdefgh"), [link(a, b, rate=1e8 + a) for a, b in combinations(range(8), 2)])
    assert len(found) == SHOWN + 2
    assert found[SHOWN].what.startswith("13 more links, none of them slower")


def test_the_slower_direction_of_a_link_is_what_it_is_worth() -> None:
    measured = [Link(0, 1, 0.5, 1e8, 1e8), Link(0, 2, 0.5, 1e8, 1e6), Link(1, 2, 0.5, 1e8, 1e8)]
    levels = [finding.level.value for finding in links_between(["n0", "n1", "n2"], measured)]
    assert levels == ["warning", "ok", "ok", "ok"], "the slowest link comes first, then the other links and the clocks"


@pytest.mark.parametrize(("setting", "milliseconds", "warned"), [("1", 80.0, 1), ("0", 80.0, 0), ("1", 9.0, 0)])
def test_a_slow_start_is_named_where_hosts_are_far_apart(
    setting: str, milliseconds: float, warned: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_speed, "SLOW_START", tmp_path / "tcp_slow_start_after_idle")
    links = [Link(0, 1, milliseconds), Link(0, 2, 1.0)]
    assert slow_start(links) == []  # the file is missing, as on systems other than Linux
    network_speed.SLOW_START.write_text(f"{setting}\n")
    found = slow_start(links)
    assert starts_slowly() == (setting != "0")
    assert [finding.level for finding in found] == [Level.WARNING] * warned
    assert all("round trips of 80 ms" in finding.what for finding in found)


def test_a_host_that_closes_in_the_middle_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"12345")
        assert network_speed._receive(ours, 3) == b"123"
        theirs.close()
        with pytest.raises(ConnectionError, match="the other host closed the connection"):
            network_speed._drop(ours, 3)


def test_ports_to_open_are_named_where_the_kernel_tells_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(network, "PORT_RANGE", tmp_path / "range")
    hosts, broken = ["n0", "n1"], [Link(0, 1, error="timed out")]
    assert "MASTER_PORT and ports above 1024;" in links_between(hosts, broken)[0].advice
    (tmp_path / "range").write_text("32768\t60999\n")
    assert "MASTER_PORT and ports 32768-60999;" in links_between(hosts, broken)[0].advice


class Axis:
    """Axis of a mesh whose collectives record their calls. `all_gather` returns the given seconds."""

    def __init__(self, name: str, size: int, calls: list[str], seconds: tuple[float, ...] = ()):
        self.axis, self.size, self.device, self._calls, self._seconds = name, size, "cpu", calls, seconds
        self.groups = [name]

    def start_all_reduce(self, tensor: Any, what: str) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: self.all_reduce(tensor, what))

    def all_reduce(self, tensor: Any, what: str) -> None:
        self._calls.append(f"{self.axis}: {what}")

    def all_gather(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        self._calls.append(f"{self.axis}: {what}")
        return torch.tensor(self._seconds)


def mesh_of(replicas: int, shard: int, seconds: tuple[float, ...]) -> tuple[SimpleNamespace, list[str]]:
    calls: list[str] = []
    all_ranks = Axis("all", replicas * shard, calls, seconds)
    return SimpleNamespace(
        replica_comms=Axis("replica", replicas, calls), shard_comms=Axis("shard", shard, calls), all_ranks=all_ranks
    ), calls


def test_a_round_takes_as_long_as_the_slowest_rank_between_replicas() -> None:
    mesh, _ = mesh_of(2, 4, seconds=(0.5, 1.0))
    sent = 4 * SMALLEST  # 2 (N-1)/N x 4 bytes per value
    findings, rate = bench_collectives(mesh, 2.0 * sent, 0.0, 60)
    found = [finding.what for finding in findings]
    assert rate == sent
    assert found == [
        "replica axis, between replicas: all-reduce over 2 ranks sends 262.1 kB from each in 1.000 s, 262.1 kB/s",
        "a synchronization of this model: 524.3 kB from each rank, about 2 s at that rate, without round trips",
        "shard axis, inside a replica: all-reduce over 4 ranks sends 393.2 kB from each in 1.000 s, 393.2 kB/s",
    ]
    assert [finding.what for finding in bench_collectives(mesh, None, 0.0, 60)[0]] == [found[0], found[2]]


def test_a_gpus_all_reduce_is_over_when_the_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, calls = mesh_of(2, 1, seconds=(1.0,))
    there = SimpleNamespace(is_cuda=True, device="cuda:1")
    there.chunk = lambda parts: [there] * parts
    mesh.replica_comms.groups *= 2
    fake = SimpleNamespace(zeros=lambda *_, **__: there, tensor=torch.tensor, float64=torch.float64)
    fake.cuda = SimpleNamespace(synchronize=lambda device: calls.append(f"synchronize {device}"))
    monkeypatch.setattr(network_speed, "torch", fake)
    findings, _ = bench_collectives(mesh, None, 0.0, 60)
    assert " in 1.000 s on 2 connections to each peer, " in findings[0].what
    measured = ["replica: measuring"] * 4 + ["synchronize cuda:1"]  # two messages at once on each connection
    # The first all-reduce, which is not timed, opens TCP's window.
    assert calls[:11] == [*measured, *measured, "all: comparing times"]


def test_the_rate_of_a_distant_link_leaves_out_its_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    now, sizes = [0.0], []

    def transfer(size: int) -> None:
        sizes.append(size)
        now[0] += 0.25 + size / rate

    monkeypatch.setattr(network_speed, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    rate = 1e8
    assert network_speed._rate(transfer, 0.25, 60) == pytest.approx(rate)
    assert 2.5 < 0.25 + sizes[-1] / rate < 5, "the transfer is as long as ten round trips, and at most twice that"
    rate = 1e4
    now[0] = 0.0
    assert network_speed._rate(transfer, 0.25, 60) == pytest.approx(rate)
    assert now[0] < 7, "over a slow link, the first transfer is long enough"
    now[0], rate = 0.0, 1e6
    network_speed._rate(transfer, 5.0, 20)
    assert now[0] < 20 / 5, "each direction ends long before other hosts give up"


def test_between_distant_replicas_an_all_reduce_counts_when_bytes_take_longer_than_hops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Among four replicas there are six hops with round trips of 0.2 s, which are hidden if enough bytes are sent."""

    def seconds(comms: Axis, mesh: Any, values: int) -> float:
        alone = 1.5 * 4 * values / 1.25e7
        return max(0.2 + alone, 6 * 0.2 + alone / 8)

    monkeypatch.setattr(network_speed, "_timed", seconds)
    mesh, _ = mesh_of(4, 1, ())
    (found, _), rate = bench_collectives(mesh, None, 0.2, 60)
    assert rate == pytest.approx(1.25e7)
    assert found.what.endswith(" s after its first round trip, 12.5 MB/s")
    _, rate = bench_collectives(mesh, None, 0.2, 4)
    assert rate == pytest.approx(1.5 * 4 * SMALLEST / (seconds(None, None, SMALLEST) - 0.2)), "no time for more values"
