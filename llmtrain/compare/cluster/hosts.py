"""Hosts of a cluster, which start, pause and kill their processes and count their network traffic."""

from __future__ import annotations

import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.compare.cluster.namespaces import FILES, counters, port_of
from llmtrain.compare.cluster.processes import MARK, continue_all, in_namespace, kill_all, marks, stop_all
from llmtrain.compare.cluster.system import run


@dataclass(frozen=True)
class Host(ABC):
    """A host of a cluster."""

    name: str
    """`host0`, `host1`, ..."""
    addresses: tuple[str, ...]
    """Addresses of its network cards, one per network."""
    interface: str
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
        inside, environment = self._inside(command, os.environ if env is None else env)
        process = subprocess.Popen(inside, env=environment, start_new_session=True, **options)
        self._started.append(process)
        return process

    def pids(self) -> list[int]:
        """Return all processes on this host: those started by `popen`, and all of their descendants."""
        started = {process.pid for process in self._started if process.poll() is None}
        return sorted(started | set(self._found()))

    def pause(self) -> None:
        """Send SIGSTOP to all processes here and wait until they stop. Raises TimeoutError if one does not."""
        stop_all(self.pids, self.name)

    def resume(self) -> None:
        """Send SIGCONT to all processes here."""
        continue_all(self.pids)

    def kill(self) -> None:
        """Send SIGKILL to all processes here and wait until they have ended. Raises TimeoutError if one does not."""
        kill_all(self.pids, self.name)
        for process in self._started:
            process.poll()  # one that ended after the last look is a zombie, whose Popen has no exit status yet

    @abstractmethod
    def sent(self, network: int = 0) -> int | None:
        """Return the bytes sent so far by the card on `network`, or None if unknown."""

    @abstractmethod
    def received(self, network: int = 0) -> int | None:
        """Return the bytes received so far by the card on `network`, or None if unknown."""

    @abstractmethod
    def _inside(self, command: Sequence[str], env: Mapping[str, str]) -> tuple[Sequence[str], Mapping[str, str]]:
        """Return the command and environment that start `command` on this host."""

    @abstractmethod
    def _found(self) -> list[int]:
        """Return the processes that can be identified as running on this host."""


@dataclass(frozen=True)
class VirtualHost(Host):
    """A network namespace, whose processes see only their own network cards and their own host name."""

    namespace: str
    switch: str
    """Namespace of the bridges that it is connected to."""
    names: Path
    """Its /etc/hosts. Its own name resolves to loopback, as on many real machines, other hosts to their addresses."""
    group: Path | None
    """File through which a process joins the host's control group; None if CPU time is not limited."""

    def sent(self, network: int = 0) -> int:
        return counters(self.namespace, f"eth{network}")[0]

    def received(self, network: int = 0) -> int:
        return counters(self.namespace, f"eth{network}")[1]

    def unplug(self, network: int = 0) -> None:
        """Disconnect ethN, as if its cable were unplugged."""
        run("ip", "-n", self.switch, "link", "set", port_of(self.name, network), "down")

    def _inside(self, command: Sequence[str], env: Mapping[str, str]) -> tuple[Sequence[str], Mapping[str, str]]:
        """Wrap `command` in prologues that each exec the next, so that Popen's process becomes the command itself."""
        name = 'mount --bind "$0" /etc/hosts && echo "$1" > /proc/sys/kernel/hostname && shift && exec "$@"'
        enter = [_path("ip"), "netns", "exec", self.namespace, _path("unshare"), "--uts"]
        inside = [*enter, "sh", "-c", name, str(self.names), self.name, *command]
        if self.group is None:
            return inside, env
        # First of all: `ip netns exec` hides the file behind a /sys of the namespace's own.
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.group), *inside], env

    def _found(self) -> list[int]:
        return in_namespace(FILES / self.namespace)


@dataclass(frozen=True)
class LoopbackHost(Host):
    """This machine on 127.0.0.1. Its processes are identified by the mark in their environment."""

    mark: str

    def sent(self, network: int = 0) -> None:
        """Return None, because all hosts share one interface."""

    def received(self, network: int = 0) -> None:
        """Return None, because all hosts share one interface."""

    def _inside(self, command: Sequence[str], env: Mapping[str, str]) -> tuple[Sequence[str], Mapping[str, str]]:
        return command, {**env, MARK: self.mark}

    def _found(self) -> list[int]:
        return [pid for pid, mark in marks().items() if mark == self.mark]


def _path(tool: str) -> str:
    """Return the path of a tool, independently of the PATH that the command gets."""
    return shutil.which(tool) or tool
