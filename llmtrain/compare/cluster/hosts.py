"""Virtual cluster: hosts with their own network cards, bandwidths and shares of CPU time, on one Linux machine.

    limits = [HostLimits(bandwidth_mbit=100)] * 3 + [HostLimits(bandwidth_mbit=30, cpus=0.5)]
    with virtual_cluster(limits) as hosts:
        started = [host.popen(["torchrun", ..., "--master-addr", hosts[0].address]) for host in hosts]
        hosts[3].pause()
        ...
        print(hosts[0].sent(), "bytes have left host0")

Hosts are network namespaces. This needs root and iproute2; `why_no_cluster` reports what is missing. On network N the
card of host K is ethN, with address 10.77.N.(K+1). A veth pair joins it to a port, hostKnetN, of the bridge netN. The
bridges have a namespace of their own (`CLUSTER-switch`), so the machine's network is not touched. If a host has latency
or loss, a process in that namespace replaces each bridge (`frame_switch`). `loopback_cluster` provides hosts with the
same API on 127.0.0.1, without root and without limits.

At the end of the `with` block the cluster and all processes in it are removed. The next process that creates a
cluster removes what a killed process left behind (`remove_leftovers`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.compare.cluster import processes
from llmtrain.compare.cluster.delaying import DelaySwitch, delay_switch
from llmtrain.compare.cluster.limits import HostLimits, controller, largest_packet, shape
from llmtrain.compare.cluster.processes import CommandError, cluster_of, marks, run, signal_all
from llmtrain.errors import ClusterError, one_line

NAMESPACES = Path("/run/netns")
"""Folder in which iproute2 keeps a file for each namespace."""
FOLDERS = Path("/run") / processes.PREFIX
"""Folder with a subfolder per virtual cluster. Owned by root, as clusters are, and empty after a reboot."""
TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "mount": "mount"}
"""Programs that virtual hosts need, and the Debian packages that contain them."""
MOST_HOSTS = 254
CONGESTION_CONTROL = "reno"
"""TCP congestion control on all hosts, so that a comparison does not depend on the machine's default. bbr, for
example, starts slowly and pauses now and then. Only reno is in every kernel and available to namespaces."""


@dataclass(frozen=True)
class Host:
    """Host of a cluster, which starts and signals its processes. A plain `Host` is this machine on 127.0.0.1, without limits."""

    name: str
    """`host0`, `host1`, ..."""
    mark: str
    """`CLUSTER-hostK`: marks the environment of the host's processes, and is the name of a virtual host's namespace."""
    addresses: tuple[str, ...] = ("127.0.0.1",)
    """Addresses of its network cards, one per network."""
    interface: str = "lo"
    """Name of its first network card."""
    _started: list[subprocess.Popen] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def address(self) -> str:
        """Return the address on the first network."""
        return self.addresses[0]

    def popen(self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen:
        """Start `command` on this host in its own session.

        `env` defaults to this process's environment; `options` are passed to Popen.
        """
        marked = {**(os.environ if env is None else env), processes.MARK: self.mark}
        process = subprocess.Popen(self._inside(command), env=marked, start_new_session=True, **options)
        self._started.append(process)
        return process

    def pids(self) -> list[int]:
        """Return the pids of all processes on this host: those started by `popen`, and all of their descendants."""
        started = {process.pid for process in self._started if process.poll() is None}
        return sorted(started | set(self._found()))

    def pause(self) -> None:
        """Send SIGSTOP to all processes on this host and wait until they stop. Raises TimeoutError if one does not."""
        signal_all(signal.SIGSTOP, self.pids, self.name)

    def resume(self) -> None:
        """Send SIGCONT to all processes on this host."""
        for pid in self.pids():
            processes.send(pid, signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL to all processes on this host and wait until they end. Raises TimeoutError if one does not."""
        signal_all(signal.SIGKILL, self.pids, self.name)
        for process in self._started:
            process.poll()  # a process that ended after the last poll is a zombie, and its Popen has no exit status yet

    def sent(self, network: int = 0) -> int | None:
        """Return the bytes sent so far by the card on `network`, or None if hosts share one."""
        return self._count("tx", network)

    def received(self, network: int = 0) -> int | None:
        """Return the bytes received so far by the card on `network`, or None if hosts share one."""
        return self._count("rx", network)

    def _count(self, direction: str, network: int) -> int | None:
        return None

    def _inside(self, command: Sequence[str]) -> Sequence[str]:
        """Return the command that starts `command` on this host."""
        return command

    def _found(self) -> list[int]:
        """Return the processes that can be identified as running on this host."""
        return [pid for pid, mark in marks().items() if mark == self.mark]


@dataclass(frozen=True, kw_only=True)
class VirtualHost(Host):
    """A network namespace whose processes see only their own network cards and their own host name."""

    switch: str
    """Namespace of the bridges that it is connected to."""
    names: Path
    """The host's /etc/hosts. Its own name resolves to loopback, as on many real machines; other names to addresses."""
    group: Path | None
    """File through which a process joins the host's control group; None if CPU time is not limited."""
    switches: list[DelaySwitch] = field(default_factory=list, compare=False)
    """Process that delays the packets of each network; empty if no host of the cluster has latency or loss."""

    def unplug(self, network: int = 0) -> None:
        """Disconnect ethN, as if its cable were unplugged."""
        run("ip", "-n", self.switch, "link", "set", f"{self.name}net{network}", "down")

    def plug_in(self, network: int = 0) -> None:
        """Connect ethN again, after `unplug`."""
        run("ip", "-n", self.switch, "link", "set", f"{self.name}net{network}", "up")

    def _count(self, direction: str, network: int) -> int:
        [shown] = json.loads(run("ip", "-n", self.mark, "-s", "-j", "link", "show", "dev", f"eth{network}"))
        return shown["stats64"][direction]["bytes"]

    def _inside(self, command: Sequence[str]) -> Sequence[str]:
        """Wrap `command` in programs that each exec the next one, so that Popen's process becomes the command itself."""
        # Full paths, because the environment of the command may have another PATH.
        ip, unshare = (shutil.which(tool) or tool for tool in ("ip", "unshare"))
        name = 'mount --bind "$0" /etc/hosts && echo "$1" > /proc/sys/kernel/hostname && shift && exec "$@"'
        enter = [ip, "netns", "exec", self.mark, unshare, "--uts"]
        inside = [*enter, "sh", "-c", name, str(self.names), self.name, *command]
        if self.group is None:
            return inside
        # Join the group first, because `ip netns exec` hides the file behind the namespace's own /sys.
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.group), *inside]

    def _found(self) -> list[int]:
        return processes.in_namespace(NAMESPACES / self.mark)


@contextmanager
def virtual_cluster(limits: Sequence[HostLimits], networks: int = 1, seed: int = 0) -> Iterator[list[VirtualHost]]:
    """Create a host for each of `limits`, on `networks` networks. On exit, remove the hosts and their processes. The
    seed determines which packets are lost.

    Raises ClusterError, whose message is one line, if a host or its limits are not available. Nothing is left behind then.
    """
    if (why := why_no_cluster()) is not None:
        raise ClusterError(f"virtual hosts can't be created here: {why}")
    if not 0 < len(limits) <= MOST_HOSTS:
        raise ClusterError(f"{len(limits)} hosts: expected 1 to {MOST_HOSTS}")
    with _new_cluster() as (cluster, hosts):
        switch = f"{cluster}-switch"
        delays = any(own.needs_delay_switch for own in limits)
        try:
            run("ip", "netns", "add", switch)
            if not delays:
                for network in range(networks):
                    run("ip", "-n", switch, "link", "add", f"net{network}", "type", "bridge")
                    run("ip", "-n", switch, "link", "set", f"net{network}", "up")
            for number in range(len(limits)):
                hosts.append(_virtual_host(cluster, switch, number, limits, networks))
        except (CommandError, OSError) as error:
            raise ClusterError(
                f"virtual hosts can't be created here: {one_line(error)}; allow it, as in a privileged container, or compare on loopback, "
                "without limits: --no-shaping"
            ) from None
        with ExitStack() as running:
            if delays:
                for network in range(networks):
                    ports = [f"{host.name}net{network}" for host in hosts]
                    delaying = running.enter_context(delay_switch(switch, ports, limits, seed))
                    for host in hosts:
                        host.switches.append(delaying)
            yield hosts


@contextmanager
def loopback_cluster(count: int) -> Iterator[list[Host]]:
    """Create `count` hosts that are all this machine, for callers without root. On exit, kill their processes."""
    with _new_cluster() as (cluster, hosts):
        hosts += [Host(f"host{number}", f"{cluster}-host{number}") for number in range(count)]
        yield hosts


def why_no_cluster() -> str | None:
    """Return a short reason why virtual hosts can't be created here, or None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        packages = dict.fromkeys(TOOLS[tool] for tool in missing)
        return f"{' and '.join(missing)} not installed (packages: {', '.join(packages)})"
    trial = f"{processes.new_name()}-trial"
    try:
        run("ip", "netns", "add", trial)
        run("ip", "-n", trial, "link", "add", "net0", "type", "bridge")
        run("ip", "-n", trial, "link", "add", "eth0", "type", "veth", "peer", "name", "port")
    except CommandError as error:
        return f"network namespaces, bridges or veth can't be created ({error})"
    finally:
        with suppress(CommandError):
            run("ip", "netns", "delete", trial)
    return None


def remove_leftovers() -> None:
    """Remove the clusters whose creators died, and kill the processes that still run in them.

    Clusters whose creators are alive are not touched, nor are clusters with processes of another PID namespace. Without
    root, only this user's loopback clusters are removed.
    """
    names, groups = list(marks().values()), controller() if os.geteuid() == 0 else None
    if os.geteuid() == 0:
        folders = [NAMESPACES, FOLDERS, *([groups.top] if groups else [])]
        names += [path.name for folder in folders for path in folder.glob("*")]
    for cluster in sorted({cluster for name in names if (cluster := cluster_of(name)) is not None}):
        if not processes.owner_lives(cluster) and not (groups and groups.is_foreign(cluster)):
            remove_cluster(cluster)


def remove_cluster(cluster: str) -> None:
    """Remove a cluster and its processes. Raises TimeoutError, OSError or CommandError if that fails."""
    signal_all(signal.SIGKILL, lambda: [pid for pid, mark in marks().items() if cluster_of(mark) == cluster], cluster)
    if os.geteuid() != 0:
        return
    namespaces = [file for file in sorted(NAMESPACES.glob("*")) if cluster_of(file.name) == cluster]
    for file in namespaces:
        signal_all(signal.SIGKILL, lambda file=file: processes.in_namespace(file), file.name)
    for file in namespaces:
        try:
            run("ip", "netns", "delete", file.name)
        except CommandError:
            if file.exists():  # otherwise another process that is starting has deleted it
                raise
    if (found := controller()) is not None:
        found.remove(cluster)
    shutil.rmtree(FOLDERS / cluster, ignore_errors=True)


@contextmanager
def _new_cluster() -> Iterator[tuple[str, list[Host]]]:
    """Yield a name and an empty list. On exit, kill and remove the hosts in it."""
    remove_leftovers()
    cluster, hosts = processes.new_name(), []
    try:
        yield cluster, hosts
    finally:
        with ExitStack() as stack:  # removes the other hosts even if one can't be killed
            stack.callback(remove_cluster, cluster)
            for host in hosts:
                stack.callback(host.kill)


def _virtual_host(cluster: str, switch: str, number: int, limits: Sequence[HostLimits], networks: int) -> VirtualHost:
    """Create a host and connect it to the bridges. `limits` are those of all hosts of the cluster."""
    name, namespace, cpus = f"host{number}", f"{cluster}-host{number}", limits[number].cpus
    addresses = tuple(f"10.77.{network}.{number + 1}" for network in range(networks))
    run("ip", "netns", "add", namespace)
    run("ip", "-n", namespace, "link", "set", "lo", "up")
    choose = f"echo {CONGESTION_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control"
    run("ip", "netns", "exec", namespace, "sh", "-c", choose)
    packet = str(largest_packet(limits))
    for network, address in enumerate(addresses):
        card, port = f"eth{network}", f"{name}net{network}"
        run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", card, "netns", namespace)
        run("ip", "-n", namespace, "link", "set", card, "gso_max_size", packet)
        run("ip", "-n", switch, "link", "set", port, "gso_max_size", packet)
        shape(limits[number], (namespace, card), (switch, port))
        bridge = () if any(own.needs_delay_switch for own in limits) else ("master", f"net{network}")
        run("ip", "-n", switch, "link", "set", port, *bridge, "up")
        run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", card)
        run("ip", "-n", namespace, "link", "set", card, "up")
    names = FOLDERS / cluster / name
    names.parent.mkdir(parents=True, exist_ok=True)
    others = [f"10.77.0.{other + 1} host{other}\n" for other in range(len(limits)) if other != number]
    names.write_text("".join(["127.0.0.1 localhost\n", f"127.0.1.1 {name}\n", *others]), encoding="utf-8")
    group = None
    if cpus is not None:
        if (found := controller()) is None:
            raise ClusterError(
                f"cpus={cpus:g} of a host: no control group for CPU time is mounted here; leave cpus out"
            )
        group = found.make(cluster, name, cpus)
    return VirtualHost(name, namespace, addresses, "eth0", switch=switch, names=names, group=group)
