"""Creation of clusters, and their removal at the end of a `with` block."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from llmtrain.compare.cluster import namespaces
from llmtrain.compare.cluster.cleanup import FOLDERS, remove_cluster, remove_leftovers
from llmtrain.compare.cluster.cpu_limits import controller_or_refuse
from llmtrain.compare.cluster.hosts import Host, LoopbackHost, VirtualHost
from llmtrain.compare.cluster.limits import HostLimits
from llmtrain.compare.cluster.names import new_name
from llmtrain.compare.cluster.system import CommandError, run
from llmtrain.errors import ClusterError

TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "mount": "mount"}
"""Programs that virtual hosts need, and the Debian packages that contain them."""


@contextmanager
def virtual_cluster(limits: Sequence[HostLimits], networks: int = 1) -> Iterator[list[VirtualHost]]:
    """Create a host for each of `limits`, on `networks` networks; on exit, remove the hosts with their processes.

    Raises ClusterError, in one line, if a host or its limits are not available. Nothing is left behind then either.
    """
    if (why := why_no_cluster()) is not None:
        raise ClusterError(f"hosts can't be made here: {why}")
    if not 0 < len(limits) <= namespaces.MOST_HOSTS:
        raise ClusterError(f"{len(limits)} hosts: expected 1 to {namespaces.MOST_HOSTS}")
    remove_leftovers()
    cluster = new_name()
    hosts: list[VirtualHost] = []
    try:
        folder = FOLDERS / cluster
        folder.mkdir(parents=True)
        namespaces.make_switch(cluster, networks)
        for number in range(len(limits)):
            hosts.append(_virtual_host(cluster, number, limits, networks, folder))
        yield hosts
    finally:
        _kill(hosts)
        remove_cluster(cluster)


@contextmanager
def loopback_cluster(count: int) -> Iterator[list[LoopbackHost]]:
    """Create `count` hosts that are all this machine, for callers without root. On exit, kill their processes."""
    remove_leftovers()
    cluster = new_name()
    names = [f"host{number}" for number in range(count)]
    hosts = [LoopbackHost(name, ("127.0.0.1",), "lo", mark=f"{cluster}-{name}") for name in names]
    try:
        yield hosts
    finally:
        _kill(hosts)
        remove_cluster(cluster)


def why_no_cluster() -> str | None:
    """Return the reason in a few words why virtual hosts can't be created here, or None if they can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        packages = dict.fromkeys(TOOLS[tool] for tool in missing)
        return f"{' and '.join(missing)} not installed (packages: {', '.join(packages)})"
    trial = f"{new_name()}-trial"
    try:
        run("ip", "netns", "add", trial)
        run("ip", "-n", trial, "link", "add", "net0", "type", "bridge")
        run("ip", "-n", trial, "link", "add", "eth0", "type", "veth", "peer", "name", "port")
    except CommandError as error:
        return f"network namespaces, bridges or veth can't be made ({error})"
    finally:
        with suppress(CommandError):
            run("ip", "netns", "delete", trial)
    return None


def _virtual_host(cluster: str, number: int, limits: Sequence[HostLimits], networks: int, folder: Path) -> VirtualHost:
    name, cpus = f"host{number}", limits[number].cpus
    namespace = namespaces.make_host(cluster, number, limits, networks)
    others = [(f"host{other}", namespaces.addresses(other, 1)[0]) for other in range(len(limits)) if other != number]
    names = folder / name
    names.write_text(
        "".join([f"127.0.0.1 localhost\n127.0.1.1 {name}\n", *(f"{address} {other}\n" for other, address in others)])
    )
    group = None if cpus is None else controller_or_refuse(cpus).make(cluster, name, cpus)
    switch = namespaces.switch_of(cluster)
    addresses = namespaces.addresses(number, networks)
    return VirtualHost(name, addresses, "eth0", namespace=namespace, switch=switch, names=names, group=group)


def _kill(hosts: Sequence[Host]) -> None:
    for host in hosts:
        host.kill()
