"""Hosts on one machine: network namespaces with addresses and names of their own, joined by bridges.

Host k is called `hostK` and has interface ethN with address 10.77.N.(k+1) on network N. As on many a real machine, its
own name leads to loopback, the others' names to their addresses on the first network. Needs root and iproute2.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "llmtrain"
_clusters = itertools.count()


@dataclass(frozen=True)
class Host:
    """A namespace: what is started in it sees only its own network cards."""

    name: str
    namespace: str
    addresses: tuple[str, ...]
    """On each network: of eth0, eth1, ..."""
    names: Path
    """Its /etc/hosts."""
    switch: str
    """The namespace of the bridges it is plugged into."""

    def popen(self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen:
        """Start `command` here. `options` are Popen's; it gets a session of its own."""
        prologue = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
        inside = ["unshare", "--uts", "sh", "-c", prologue, str(self.names), self.name, *command]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *inside], env=env, start_new_session=True, **options
        )

    def sent(self, interface: str) -> int:
        """Bytes that have left by a network card so far."""
        shown = _ip("netns", "exec", self.namespace, "cat", f"/sys/class/net/{interface}/statistics/tx_bytes")
        return int(shown)

    def unplug(self, network: int) -> None:
        """Pull the cable of ethN."""
        _ip("-n", self.switch, "link", "set", f"{self.name}net{network}", "down")


def why_not() -> str | None:
    """Why hosts can't be made here, in a few words; None where they can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not installed (packages iproute2, util-linux)"
    trial = f"{PREFIX}-{os.getpid()}-trial"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces can't be made: {made.stderr.strip()}"
    _ip("netns", "delete", trial)
    return None


@contextmanager
def hosts(count: int, networks: int = 1) -> Iterator[list[Host]]:
    """`count` hosts on `networks` networks. Afterwards they are gone, with everything that still ran in them."""
    remove_leftovers()
    name = f"{PREFIX}-{os.getpid()}-{next(_clusters)}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield _make(name, count, networks, Path(folder))
        finally:
            _remove(made for made in _namespaces() if made.startswith(f"{name}-"))


def remove_leftovers() -> None:
    """Remove the hosts of processes that died without doing so."""
    dead = []
    for name in _namespaces():
        owner = re.match(rf"{PREFIX}-(\d+)-", name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            dead.append(name)
    _remove(dead)


def _make(name: str, count: int, networks: int, folder: Path) -> list[Host]:
    """The bridges have a namespace of their own, so the machine's network is not touched."""
    switch = f"{name}-switch"
    _ip("netns", "add", switch)
    for network in range(networks):
        _ip("-n", switch, "link", "add", f"net{network}", "type", "bridge")
        _ip("-n", switch, "link", "set", f"net{network}", "up")
    made = []
    for k in range(count):
        host = f"{name}-host{k}"
        _ip("netns", "add", host)
        _ip("-n", host, "link", "set", "lo", "up")
        for n in range(networks):
            port = f"host{k}net{n}"
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", f"eth{n}", "netns", host)
            _ip("-n", switch, "link", "set", port, "master", f"net{n}", "up")
            _ip("-n", host, "addr", "add", f"10.77.{n}.{k + 1}/24", "dev", f"eth{n}")
            _ip("-n", host, "link", "set", f"eth{n}", "up")
        others = "".join(f"10.77.0.{other + 1} host{other}\n" for other in range(count) if other != k)
        names = folder / f"host{k}"
        names.write_text(f"127.0.0.1 localhost\n127.0.1.1 host{k}\n{others}")
        made.append(Host(f"host{k}", host, tuple(f"10.77.{n}.{k + 1}" for n in range(networks)), names, switch))
    return made


def _remove(names: Iterator[str] | list[str]) -> None:
    for name in names:
        for pid in _ip("netns", "pids", name).split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        _ip("netns", "delete", name)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines()]


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
