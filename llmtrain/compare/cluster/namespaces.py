"""Network namespaces as hosts, and the cables and bridges between them.

Host k is called `hostK`. On network N its card is ethN, with address 10.77.N.(k+1). The bridges have a namespace of
their own (`CLUSTER-switch`), so the machine's network is not touched.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from llmtrain.compare.cluster.limits import HostLimits
from llmtrain.compare.cluster.names import cluster_of
from llmtrain.compare.cluster.processes import in_namespace, kill_all
from llmtrain.compare.cluster.shaping import CONGESTION_CONTROL, largest_packet, shape
from llmtrain.compare.cluster.system import CommandError, run

FILES = Path("/run/netns")
"""Folder in which iproute2 keeps a file for each namespace."""
MOST_HOSTS = 254


def switch_of(cluster: str) -> str:
    """Return the name of the namespace that contains a cluster's bridges."""
    return f"{cluster}-switch"


def port_of(host: str, network: int) -> str:
    """Return the name of the bridge's end of a host's cable."""
    return f"{host}net{network}"


def addresses(host: int, networks: int) -> tuple[str, ...]:
    """Return the address of a host on each network."""
    return tuple(f"10.77.{network}.{host + 1}" for network in range(networks))


def make_switch(cluster: str, networks: int) -> None:
    """Create the namespace of the bridges, with one bridge per network."""
    switch = switch_of(cluster)
    run("ip", "netns", "add", switch)
    for network in range(networks):
        run("ip", "-n", switch, "link", "add", f"net{network}", "type", "bridge")
        run("ip", "-n", switch, "link", "set", f"net{network}", "up")


def make_host(cluster: str, number: int, limits: Sequence[HostLimits], networks: int) -> str:
    """Create a host, connect it to the bridges, and return its namespace.

    `limits` are those of all hosts of the cluster. Raises ClusterError for limits that the kernel does not support.
    """
    host, switch = f"{cluster}-host{number}", switch_of(cluster)
    run("ip", "netns", "add", host)
    run("ip", "-n", host, "link", "set", "lo", "up")
    choose = f"echo {CONGESTION_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control"
    run("ip", "netns", "exec", host, "sh", "-c", choose)
    packet = str(largest_packet(limits))
    for network, address in enumerate(addresses(number, networks)):
        card, port = f"eth{network}", port_of(f"host{number}", network)
        run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", card, "netns", host)
        run("ip", "-n", host, "link", "set", card, "gso_max_size", packet)
        run("ip", "-n", switch, "link", "set", port, "gso_max_size", packet)
        shape(limits[number], (host, card), (switch, port))
        run("ip", "-n", switch, "link", "set", port, "master", f"net{network}", "up")
        run("ip", "-n", host, "addr", "add", f"{address}/24", "dev", card)
        run("ip", "-n", host, "link", "set", card, "up")
    return host


def counters(namespace: str, card: str) -> tuple[int, int]:
    """Return (bytes sent, bytes received) by a card."""
    [shown] = json.loads(run("ip", "-n", namespace, "-s", "-j", "link", "show", "dev", card))
    return shown["stats64"]["tx"]["bytes"], shown["stats64"]["rx"]["bytes"]


def clusters() -> set[str]:
    """Return the clusters that have namespaces."""
    return {name for file in _files() if (name := cluster_of(file.name)) is not None}


def remove(cluster: str) -> None:
    """Remove all namespaces of a cluster with their cables and bridges, and kill the processes in them."""
    mine = [file for file in _files() if cluster_of(file.name) == cluster]
    for file in mine:
        kill_all(lambda file=file: in_namespace(file), file.name)
    for file in mine:
        try:
            run("ip", "netns", "delete", file.name)
        except CommandError:
            if file.exists():  # else another process that starts now has done it
                raise


def _files() -> list[Path]:
    return sorted(FILES.iterdir()) if FILES.is_dir() else []
