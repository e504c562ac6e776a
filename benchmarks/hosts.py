"""Processes of a benchmark, one on each host of a virtual cluster, which measure one task after another together.

The main process of the script opens the hosts and asks for measurements. The processes on the hosts run the same script and serve:

    if __name__ == "__main__" and not serves(measure):
        with open_hosts(4, 100) as hosts, HostRanks(__file__, hosts, log) as ranks:
            answers = ranks.ask({"loop": "ddp"}, patience=600)

`measure(task, member)` is called on all hosts at the same time, and returns the host's answer. Tasks and answers are JSON.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from loops import RowFailed
from table import ROOT

if TYPE_CHECKING:
    import torch.distributed as dist

    from llmtrain.compare.cluster.hosts import Host

MEMBER = "BENCHMARK_MEMBER"
"""Environment variable of a process on a host (JSON): its rank and address, the store, and the descriptor of its socket."""
STORE_PORT = 29_400
"""Port below that of the ranks' first store on a virtual host, where no other program has ports. Each new store takes the next one."""
GRACE_SECONDS = 5.0
"""Seconds for the other ranks to answer after the first one has failed."""
START_SECONDS = 300.0
"""Seconds for all processes to start and import their modules, on a busy machine."""
TIMEOUT = timedelta(seconds=300)
"""Timeout of every wait among ranks."""
NET_DEVICES = Path("/proc/self/net/dev")
SENT_FIELD = 8
"""Position of the bytes sent among the counters of an interface in NET_DEVICES (proc_net_dev(5))."""


@contextmanager
def open_hosts(count: int, bandwidth_mbit: float | None, latency_ms: float | None = None) -> Iterator[Sequence[Host]]:
    """Yield virtual hosts with these limits. Without limits, yield hosts on loopback if virtual ones cannot be created here.

    Raises ClusterError if limits are given and virtual hosts cannot be created here.
    """
    from llmtrain.compare.cluster.hosts import loopback_cluster, virtual_cluster, why_no_cluster
    from llmtrain.compare.cluster.limits import HostLimits

    limits = HostLimits(bandwidth_mbit=bandwidth_mbit, latency_ms=latency_ms)
    is_plain = limits == HostLimits() and why_no_cluster() is not None
    with loopback_cluster(count) if is_plain else virtual_cluster([limits] * count) as hosts:
        yield hosts


# ---- on a host


@dataclass(frozen=True)
class Member:
    """This process as one of the ranks. Each host has one rank."""

    rank: int
    size: int
    address: str
    """Address of this host."""
    interface: str
    store: dist.Store
    """Store of all ranks, with a prefix per task."""

    def barrier(self, name: str) -> None:
        """Wait until all ranks have reached the barrier `name`, which can be used once per task. Raises RuntimeError after TIMEOUT."""
        key = f"barrier {name}"
        if self.store.add(key, 1) == self.size:
            self.store.set(f"{key} is complete", "yes")
        self.store.wait([f"{key} is complete"], TIMEOUT)

    def sent(self) -> int | None:
        """Return the bytes that this host has sent, including headers, or None on loopback, which all hosts share."""
        if self.interface == "lo":
            return None
        return sent_by(self.interface, NET_DEVICES.read_text())


def sent_by(interface: str, devices: str) -> int:
    """Return the bytes that an interface has sent, from the text of NET_DEVICES."""
    lines = (line.partition(":") for line in devices.splitlines())
    return next(int(counters.split()[SENT_FIELD]) for name, _, counters in lines if name.strip() == interface)


def serves(measure: Callable[[dict[str, Any], Member], Any]) -> bool:
    """Measure until there are no more tasks, and return True, in a process of HostRanks. Return False in any other process."""
    if MEMBER not in os.environ:
        return False
    import torch
    import torch.distributed as dist

    given = json.loads(os.environ[MEMBER])
    asked = connection.Connection(given["descriptor"])
    torch.set_num_threads(1)
    rank, size, master, port = given["rank"], given["size"], given["master"], given["port"]
    store = dist.TCPStore(master, port, is_master=rank == 0, wait_for_workers=False, timeout=TIMEOUT)
    asked.send_bytes(json.dumps({"answer": "ready"}).encode())
    number = 0
    while True:
        try:
            task = json.loads(asked.recv_bytes())
        except EOFError:  # the main process has closed its end, or has died
            return True
        number += 1
        member = Member(rank, size, given["address"], given["interface"], dist.PrefixStore(f"task {number}", store))
        try:
            reply = {"answer": measure(task, member)}
        except Exception as error:
            traceback.print_exc()
            reply = {"failed": " ".join(str(error).split())[:300] or type(error).__name__}
        asked.send_bytes(json.dumps(reply).encode())


# ---- in the main process


class HostRanks:
    """Processes of a script, one on each host, which all measure the same tasks. The context manager ends them on exit. If a
    task fails, all processes are replaced before the next one."""

    def __init__(self, script: str, hosts: Sequence[Host], log: IO[str]):
        """Write everything that the processes print to `log`."""
        self._script, self._hosts, self._log = script, hosts, log
        self._asks: list[connection.Connection] = []
        self._port = STORE_PORT

    def __enter__(self) -> HostRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, task: Mapping[str, Any], patience: float) -> list[Any]:
        """Return the answers of all ranks to a task, in the order of the ranks. Raises RowFailed with the first failure, or after
        `patience` seconds."""
        measuring = f"{Path(self._script).name}: measuring {dict(task)}"
        if not self._asks:
            self._start()
            self._collect("starting the processes", START_SECONDS)
        for ask in self._asks:
            ask.send_bytes(json.dumps(dict(task)).encode())
        return self._collect(measuring, patience)

    def close(self) -> None:
        """Kill the processes on the hosts; the next task starts new ones."""
        for ask in self._asks:
            ask.close()
        if self._asks:
            for host in self._hosts:
                host.kill()
        self._asks = []

    def _start(self) -> None:
        first = self._hosts[0]
        self._port = free_port() if first.interface == "lo" else self._port + 1
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        for rank, host in enumerate(self._hosts):
            ours, theirs = socket.socketpair()
            member = {
                "rank": rank,
                "size": len(self._hosts),
                "address": host.address,
                "interface": host.interface,
                "master": first.address,
                "port": self._port,
                "descriptor": theirs.fileno(),
            }
            variables = {
                "PYTHONPATH": path,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "GLOO_SOCKET_IFNAME": host.interface,
                MEMBER: json.dumps(member),
            }
            with theirs:
                host.popen(
                    [sys.executable, self._script],
                    env={**os.environ, **variables},
                    cwd=ROOT,
                    stdout=self._log,
                    stderr=self._log,
                    pass_fds=[theirs.fileno()],
                )
            self._asks.append(connection.Connection(ours.detach()))

    def _collect(self, what: str, patience: float) -> list[Any]:
        waiting = {ask: rank for rank, ask in enumerate(self._asks)}
        answers: list[Any] = [None] * len(waiting)
        failure, deadline = None, time.monotonic() + patience
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = ", ".join(map(str, sorted(waiting.values())))
                failure = failure or f"took longer than {patience:.0f} s on rank {silent}"
                break
            for ask in ready:
                rank = waiting.pop(ask)
                try:
                    reply = json.loads(ask.recv_bytes())
                except (EOFError, ConnectionResetError):
                    reply = {"failed": "its process has died; see the log"}
                if "failed" in reply and failure is None:
                    failure, deadline = f"failed on rank {rank}: {reply['failed']}", time.monotonic() + GRACE_SECONDS
                answers[rank] = reply.get("answer")
        if failure is not None:
            self.close()  # the remaining ranks would wait for those that have failed
            raise RowFailed(what, failure)
        return answers


def free_port() -> int:
    """Return a port of loopback on which no program listens at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
