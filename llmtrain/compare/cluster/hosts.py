"""Hosts: places to start processes in, to pause and to kill them, and to see what they sent."""

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
    """One of a cluster's hosts."""

    name: str
    """`host0`, `host1`, ..."""
    addresses: tuple[str, ...]
    """Of its network cards, in the order of networks."""
    interface: str
    """Its first network card."""
    _started: list[subprocess.Popen] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def address(self) -> str:
        """On the first network."""
        return self.addresses[0]

    def popen(self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen:
        """Start `command` here, in a session of its own. `env`: None for that of this process; `options` are Popen's."""
        inside, environment = self._inside(command, os.environ if env is None else env)
        process = subprocess.Popen(inside, env=environment, start_new_session=True, **options)
        self._started.append(process)
        return process

    def pids(self) -> list[int]:
        """All processes that run here: started here, by those, and so on."""
        started = {process.pid for process in self._started if process.poll() is None}
        return sorted(started | set(self._found()))

    def pause(self) -> None:
        """SIGSTOP everything that runs here. Raises TimeoutError if something does not stop."""
        stop_all(self.pids, self.name)

    def resume(self) -> None:
        """SIGCONT everything that runs here."""
        continue_all(self.pids)

    def kill(self) -> None:
        """SIGKILL everything that runs here, and wait until it is gone. Raises TimeoutError if it stays."""
        kill_all(self.pids, self.name)

    @abstractmethod
    def sent(self, network: int = 0) -> int | None:
        """Bytes that have left by a network card so far; None where that is not known."""

    @abstractmethod
    def received(self, network: int = 0) -> int | None:
        """Bytes that have come in by a network card so far; None where that is not known."""

    @abstractmethod
    def _inside(self, command: Sequence[str], env: Mapping[str, str]) -> tuple[Sequence[str], Mapping[str, str]]:
        """The command and environment that start `command` here."""

    @abstractmethod
    def _found(self) -> list[int]:
        """Processes that can be seen to run here."""


@dataclass(frozen=True)
class VirtualHost(Host):
    """A network namespace: what runs in it sees only its own network cards, and its own host name."""

    namespace: str
    switch: str
    """The namespace of the bridges that it is plugged into."""
    names: Path
    """Its /etc/hosts. As on many a real machine, its own name leads to loopback, the others' to their addresses."""
    group: Path | None
    """The file by which a process joins its control group, if its CPU time is limited."""

    def sent(self, network: int = 0) -> int:
        """Bytes that have left by ethN so far."""
        return counters(self.namespace, f"eth{network}")[0]

    def received(self, network: int = 0) -> int:
        """Bytes that have come in by ethN so far."""
        return counters(self.namespace, f"eth{network}")[1]

    def unplug(self, network: int = 0) -> None:
        """Pull the cable of ethN."""
        run("ip", "-n", self.switch, "link", "set", port_of(self.name, network), "down")

    def _inside(self, command: Sequence[str], env: Mapping[str, str]) -> tuple[Sequence[str], Mapping[str, str]]:
        """Each prologue replaces itself by the next, so the process that Popen knows is the command itself."""
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
    """This machine itself, on 127.0.0.1. Its processes are those that carry its mark in their environment."""

    mark: str

    def sent(self, network: int = 0) -> None:
        """Not known: all hosts share one interface."""

    def received(self, network: int = 0) -> None:
        """Not known: all hosts share one interface."""

    def _inside(self, command: Sequence[str], env: Mapping[str, str]) -> tuple[Sequence[str], Mapping[str, str]]:
        return command, {**env, MARK: self.mark}

    def _found(self) -> list[int]:
        return [pid for pid, mark in marks().items() if mark == self.mark]


def _path(tool: str) -> str:
    """Of a tool, wherever the command's own PATH leads."""
    return shutil.which(tool) or tool
