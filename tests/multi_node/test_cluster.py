"""Tests of the virtual cluster: bandwidths, latencies, counters, CPU shares, processes, and what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest

from llmtrain.compare.cluster import processes
from llmtrain.compare.cluster.hosts import (
    FOLDERS,
    NAMESPACES,
    Host,
    VirtualHost,
    loopback_cluster,
    remove_leftovers,
    virtual_cluster,
)
from llmtrain.compare.cluster.limits import HostLimits, controller
from llmtrain.compare.cluster.processes import cluster_of, marks
from llmtrain.errors import ClusterError
from tests.end_to_end.runs import ROOT, is_gone
from tests.multi_node.runs import needs_hosts

SECONDS = 60
"""Timeout of a small program on a busy machine."""
FAST, THIN = 100, 30
"""Bandwidths in Mbit/s."""
RECEIVE = """
import socket
with socket.create_server(("0.0.0.0", 5555)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    while connection.recv(1 << 18): pass
    connection.sendall(b"x")
"""
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5555), timeout=60) as connection:
    start = time.perf_counter()
    connection.sendall(bytes(int(sys.argv[2])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    print(time.perf_counter() - start)
"""
SPIN = """
import time
start, used = time.monotonic(), time.process_time()
while time.monotonic() - start < 1.5: pass
print((time.process_time() - used) / (time.monotonic() - start))
"""
TREE = "sleep 600 & setsid sleep 600 & wait"
"""Shell command of three processes, one of them in its own session, as torchrun's ranks are."""


def python(host: Host, program: str, *arguments: str) -> subprocess.Popen:
    return host.popen([sys.executable, "-S", "-c", program, *arguments], stdout=subprocess.PIPE, text=True)


def number(process: subprocess.Popen) -> float:
    """Return the number that a program prints."""
    output, _ = process.communicate(timeout=SECONDS)
    return float(output)


def seconds_for(size: int, sender: Host, receiver: Host) -> float:
    """Return the seconds that `size` bytes take from one host to another, until the last byte has arrived."""
    receiving = python(receiver, RECEIVE)
    assert receiving.stdout.readline() == "listening\n"
    took = number(python(sender, SEND, receiver.address, str(size)))
    receiving.communicate(timeout=SECONDS)
    return took


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what} after {SECONDS} s"
        time.sleep(0.02)


def state(pid: int) -> str:
    """Return a process's state: R, S, T (stopped), ..., or an empty string once it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.fixture(scope="module")
def three() -> Iterator[list[VirtualHost]]:
    """Provide three hosts, of which the third has a thin cable."""
    with virtual_cluster([HostLimits(bandwidth_mbit=mbit) for mbit in (FAST, FAST, THIN)]) as made:
        yield made


@needs_hosts
@pytest.mark.deep
@pytest.mark.parametrize(
    ("sender", "receiver", "mbit"), [(0, 1, FAST), (1, 0, FAST), (0, 2, THIN), (2, 0, THIN)], ids="{}".format
)
def test_each_cable_carries_its_bandwidth_in_both_directions(three, sender: int, receiver: int, mbit: int):
    size = mbit * 1_000_000 // 16  # half a second
    sent, received = three[sender].sent(), three[receiver].received()
    took = seconds_for(size, three[sender], three[receiver])
    assert 0.5 < took < 1.0
    assert size < three[receiver].received() - received < 1.05 * size
    again = 0.5 if (sender, receiver) == (0, 2) else 0  # for what the thin cable drops before TCP slows down
    assert size < three[sender].sent() - sent < (1.05 + again) * size


@needs_hosts
@pytest.mark.deep
def test_without_a_limit_it_is_fast():
    with virtual_cluster([HostLimits()] * 2) as pair:
        assert seconds_for(25_000_000, *pair) < 1.0  # at 100 Mbit/s it would take 2 s


@needs_hosts
@pytest.mark.deep
@pytest.mark.skipif(controller() is None, reason="no control group for CPU time is mounted")
def test_a_share_of_cpu_time_is_that_of_all_processes_together():
    try:
        with virtual_cluster([HostLimits(cpus=0.1), HostLimits()]) as (slow, fast):
            spinning = [python(host, SPIN) for host in (slow, slow, fast)]
            *shares, unlimited = [number(process) for process in spinning]
    except ClusterError as error:
        pytest.skip(str(error))
    assert 0.05 < sum(shares) < 0.13
    assert unlimited > 2 * sum(shares)


ROUND_TRIP = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as peer:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trips, deadline = [], time.monotonic() + 40
    while len(trips) < 8 or (min(trips) >= float(sys.argv[3]) and time.monotonic() < deadline):
        began = time.perf_counter()
        peer.sendall(b"x")
        peer.recv(1)
        trips.append(time.perf_counter() - began)
print(min(trips))
"""
ECHO = """
import socket
with socket.create_server(("0.0.0.0", 0)) as server:
    print(server.getsockname()[1], flush=True)
    peer, _ = server.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while found := peer.recv(1):
        peer.sendall(found)
"""


def round_trip(first: VirtualHost, second: VirtualHost, most: float) -> float:
    """Return the seconds of the fastest of several round trips of one byte. On a busy machine, there are more until one
    takes less than `most`."""
    echo = python(second, ECHO)
    port = echo.stdout.readline().strip()
    return number(python(first, ROUND_TRIP, second.address, port, str(most)))


@needs_hosts
def test_each_sender_delays_by_its_own_latency_and_no_more():
    with virtual_cluster([HostLimits(latency_ms=50), HostLimits(latency_ms=20), HostLimits()]) as (far, near, here):
        assert 0.07 < round_trip(far, near, 0.09) < 0.09
        assert 0.02 < round_trip(here, near, 0.04) < 0.04
        counters = far.switches[0].counters()
        assert counters.forwarded > 40 and counters.lost == counters.dropped == 0
        assert counters.latest_seconds >= counters.late_seconds / counters.forwarded > 0 < counters.cpu_seconds


@needs_hosts
@pytest.mark.deep
def test_bandwidth_and_latency_hold_at_once():
    with virtual_cluster([HostLimits(bandwidth_mbit=80, latency_ms=5)] * 2) as pair:
        size = 5_000_000  # half a second
        sent = pair[0].sent()
        assert 0.5 < seconds_for(size, *pair) < 0.8
        assert size < pair[0].sent() - sent < 1.05 * size


@needs_hosts
@pytest.mark.deep
def test_what_is_lost_is_sent_again():
    with virtual_cluster([HostLimits(bandwidth_mbit=80, loss=0.02), HostLimits(bandwidth_mbit=80)]) as pair:
        size, sent = 3_000_000, pair[0].sent()
        assert seconds_for(size, *pair) > 0.3
        counters = pair[0].switches[0].counters()
        frames = size / 1448
        assert 0.005 * frames < counters.lost < 0.05 * frames
        assert pair[0].sent() - sent > size * (1 + 66 / 1448)


@contextmanager
def a_pair(kind: str) -> Iterator[list[Host]]:
    with virtual_cluster([HostLimits()] * 2) if kind == "virtual" else loopback_cluster(2) as made:
        yield made


@pytest.mark.parametrize("kind", [pytest.param("virtual", marks=needs_hosts), "loopback"])
def test_all_processes_of_one_host_are_paused_resumed_and_killed(kind: str):
    with a_pair(kind) as (host, other):
        process, bystander = host.popen(["sh", "-c", TREE]), other.popen(["sleep", "600"])
        wait_for(lambda: len(host.pids()) == 3, "not three processes")
        pids = host.pids()
        family = list(map(psutil.Process, pids))
        assert process.pid in pids and bystander.pid not in pids
        host.pause()
        assert [state(pid) for pid in pids] == ["T"] * 3
        host.resume()
        wait_for(lambda: "T" not in map(state, pids), "not resumed")
        host.pause()
        host.kill()
        assert all(map(is_gone, family)) and host.pids() == [] and process.returncode == -signal.SIGKILL
        assert bystander.poll() is None
    assert bystander.returncode == -signal.SIGKILL  # killed at the end of the cluster


def test_a_process_that_ends_between_two_looks_has_an_exit_status_too(monkeypatch):
    look = processes.stat_of
    with loopback_cluster(1) as (host,):
        process = host.popen(["sleep", "600"])

        def ends_now(pid: int) -> list[str]:
            if pid == process.pid:
                process.send_signal(signal.SIGKILL)
                with suppress(ChildProcessError):  # an earlier call has taken its exit status
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            return look(pid)

        monkeypatch.setattr(processes, "send", lambda pid, number: None)
        monkeypatch.setattr(processes, "stat_of", ends_now)
        host.kill()
        monkeypatch.undo()
        assert process.returncode == -signal.SIGKILL


def test_a_process_is_found_also_while_it_becomes_another_program(tmp_path):
    again = tmp_path / "again.sh"
    again.write_text('echo > "$1"; exec sh "$0" "$1"')
    with loopback_cluster(1) as (host,):
        process = host.popen(["sh", str(again), str(tmp_path / "began")])
        wait_for((tmp_path / "began").exists, "it did not begin")
        assert [process.pid in marks() for _ in range(200)] == [True] * 200


def test_a_process_without_an_environment_has_no_mark():
    with subprocess.Popen(["/bin/sleep", "600"], env={}) as bare:
        try:
            assert bare.pid not in marks()
        finally:
            bare.kill()


@needs_hosts
def test_hosts_have_names_and_know_each_other(three):
    ask = "import socket; print(socket.gethostname(), *map(socket.gethostbyname, ['host0', 'host1', 'host2']))"
    shown, _ = python(three[1], ask).communicate(timeout=SECONDS)
    assert shown.split() == ["host1", "10.77.0.1", "127.0.1.1", "10.77.0.3"]


@needs_hosts
def test_an_environment_and_an_exit_code_pass_through(three):
    process = three[0].popen(["sh", "-c", 'exit "$CODE"'], env={"CODE": "7", "PATH": "/bin:/usr/bin"})
    assert process.wait(timeout=SECONDS) == 7


PARENT = """
import sys, time
from llmtrain.compare.cluster.hosts import loopback_cluster, virtual_cluster
from llmtrain.compare.cluster.limits import HostLimits
kind, limits = sys.argv[1], [HostLimits(cpus=float(cpus)) if cpus else HostLimits() for cpus in sys.argv[2:]]
with virtual_cluster(limits) if kind == "virtual" else loopback_cluster(1) as hosts:
    for host in hosts:
        host.popen(["sh", "-c", "sleep 600 & setsid sleep 600 & wait"])
    deadline = time.monotonic() + 60
    while [len(host.pids()) for host in hosts] != [3] * len(hosts):
        if time.monotonic() > deadline:
            sys.exit("the processes of its hosts are not there after 60 s")
        time.sleep(0.02)
    print(*(pid for host in hosts for pid in host.pids()), flush=True)
    time.sleep(600)
"""


def start_parent(*arguments: str) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """Start a process that creates its own cluster and stays. Return the process and the processes in the cluster."""
    command = [sys.executable, "-c", PARENT, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return process, [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]


def traces(pid: int) -> list[str]:
    """Return the namespaces, folders and control groups on this machine that belong to clusters of a process."""
    found = controller()
    places = [
        place for place in (NAMESPACES, FOLDERS, found.top if found else None) if place is not None and place.is_dir()
    ]
    names = [path for place in places for path in place.iterdir() if cluster_of(path.name)]
    return sorted(str(path) for path in names if path.name.split("-")[1] == str(pid))


@needs_hosts
def test_the_next_start_removes_what_a_killed_process_left_and_nothing_else():
    share = "0.5" if controller() is not None else ""
    killed, lost = start_parent("virtual", "", share)
    living, kept = start_parent("virtual", share)
    try:
        before = traces(living.pid)
        assert len(lost) == 6 and not any(map(is_gone, lost))
        assert len(traces(killed.pid)) == (5 if share else 4)  # two hosts, their switch, a folder, a control group
        killed.kill()  # from now on, a cluster that starts in another worker may remove what is left
        killed.wait(timeout=SECONDS)
        with virtual_cluster([HostLimits()]):
            assert traces(killed.pid) == [] and all(map(is_gone, lost))
            assert traces(living.pid) == before != []
            assert len(kept) == 3 and not any(map(is_gone, kept))
    finally:
        for process in (killed, living):
            process.kill()
            process.wait(timeout=SECONDS)
        remove_leftovers()
    assert traces(living.pid) == [] and all(map(is_gone, kept))


def test_the_next_start_on_loopback_kills_what_ran_in_a_killed_one():
    killed, lost = start_parent("loopback")
    living, kept = start_parent("loopback")
    try:
        assert len(lost) == 3 and not any(map(is_gone, lost))
        killed.kill()  # from now on, a cluster that starts in another worker may remove what is left
        killed.wait(timeout=SECONDS)
        with loopback_cluster(1):
            assert all(map(is_gone, lost))
            assert len(kept) == 3 and not any(map(is_gone, kept))
    finally:
        living.kill()
        living.wait(timeout=SECONDS)
        remove_leftovers()
    assert all(map(is_gone, kept))


@needs_hosts
def test_an_error_inside_leaves_nothing():
    with pytest.raises(ZeroDivisionError), virtual_cluster([HostLimits()]) as [host]:
        process = host.popen(["sleep", "600"])
        folder = host.names.parent
        raise ZeroDivisionError
    assert process.returncode == -signal.SIGKILL
    assert not folder.exists() and not (NAMESPACES / host.mark).exists() and not (NAMESPACES / host.switch).exists()


@needs_hosts
def test_a_limit_that_is_refused_leaves_nothing():
    before = traces(os.getpid())
    with pytest.raises(ClusterError, match=r"cpus=1e-05 of a host: the kernel can't give less than 0\.001"):
        virtual_cluster([HostLimits(), HostLimits(cpus=1e-5)]).__enter__()
    assert traces(os.getpid()) == before


UNPRIVILEGED = """
import os, subprocess
from llmtrain.compare.cluster.hosts import loopback_cluster, virtual_cluster, why_no_cluster
from llmtrain.compare.cluster.limits import HostLimits
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
print(why_no_cluster())
with loopback_cluster(2) as hosts:
    process = hosts[1].popen(["sh", "-c", "echo here; sleep 600"], stdout=subprocess.PIPE, text=True)
    print(process.stdout.readline().strip(), hosts[1].address, hosts[1].interface, hosts[1].sent(), hosts[1].received())
print(process.returncode)
"""


def test_loopback_needs_no_rights():
    command = [sys.executable, "-c", UNPRIVILEGED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.stdout.splitlines() == ["network namespaces need root", "here 127.0.0.1 lo None None", "-9"], (
        done.stderr
    )
