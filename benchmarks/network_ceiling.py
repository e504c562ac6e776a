"""Throughput of network.py's virtual network while every host sends to the next one."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmtrain.compare.cluster.limits import HostLimits

PORT = 29401
SECONDS = 2.0
PATIENCE_SECONDS = 60
RECEIVE = """
import socket, sys, time
with socket.create_server(("0.0.0.0", int(sys.argv[1]))) as server:
    print("listening", flush=True)
    peer, _ = server.accept()
    began, received = None, 0
    while found := peer.recv(1 << 20):
        now = time.perf_counter()
        # The second half: in the first one TCP finds out how fast it may be.
        if began is None: first = began = now
        if now - first < float(sys.argv[2]) / 2: began, received = now, 0
        else: received += len(found)
    print(8e-6 * received / max(now - began, 1e-9), flush=True)
"""
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60) as peer:
    until, some = time.perf_counter() + float(sys.argv[3]), bytes(1 << 18)
    while time.perf_counter() < until: peer.sendall(some)
"""


def carried_mbit(limits: HostLimits, hosts: int) -> float:
    """Return the Mbit/s of payload that a host sends while it receives as much: the mean over `hosts` hosts."""
    from llmtrain.compare.cluster.hosts import virtual_cluster

    with virtual_cluster([limits] * hosts) as cluster:
        receivers = [
            host.popen(
                [sys.executable, "-S", "-c", RECEIVE, str(PORT), str(SECONDS)], stdout=subprocess.PIPE, text=True
            )
            for host in cluster
        ]
        for receiver in receivers:
            receiver.stdout.readline()
        for host, following in zip(cluster, [*cluster[1:], cluster[0]], strict=True):
            host.popen([sys.executable, "-S", "-c", SEND, following.address, str(PORT), str(SECONDS)])
        return sum(float(receiver.communicate(timeout=PATIENCE_SECONDS)[0]) for receiver in receivers) / hosts
