"""Functions that find the processes of a host, and stop, continue or kill all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from llmtrain.compare.cluster.names import stat_of

SECONDS = 10.0
"""Timeout for processes to obey a signal that can't be refused."""
MARK = "LLMTRAIN_VIRTUAL_HOST"
"""Environment variable that identifies the processes of a loopback host. They have nothing else in common, because
torchrun gives each of its ranks its own session."""

EXEC_SECONDS = 1.0
"""Longest time that execve may take between two reads of an environment. A busy machine suspends processes in the middle of it."""
START_TIME = 19
"""Field of `stat_of`: when the process started. With the pid, it identifies a process."""

Find = Callable[[], Collection[int]]
"""Function that looks up the pids of a group of processes, anew at each call."""


def in_namespace(namespace: Path) -> list[int]:
    """Return the processes in the network namespace with this file."""
    try:
        wanted = namespace.stat()
    except FileNotFoundError:
        return []
    found = []
    for pid in _all():
        with contextlib.suppress(OSError):  # it has ended
            own = os.stat(f"/proc/{pid}/ns/net")
            if (own.st_dev, own.st_ino) == (wanted.st_dev, wanted.st_ino):
                found.append(pid)
    return found


def marks() -> dict[int, str]:
    """Return {pid: mark} for the processes with a mark in an environment that this user may read."""
    found = {}
    start = f"{MARK}=".encode()
    for pid in _all():
        with contextlib.suppress(OSError):
            for variable in _environment(pid).split(b"\0"):
                if variable.startswith(start):
                    found[pid] = variable.removeprefix(start).decode(errors="replace")
    return found


def kill_all(find: Find, whose: str) -> None:
    """Send SIGKILL until all processes have ended, also those that `find` no longer returns while they exit.

    Raises TimeoutError after SECONDS.
    """
    _signal_until(signal.SIGKILL, find, _is_gone, f"processes of {whose} are there after SIGKILL")


def stop_all(find: Find, whose: str) -> None:
    """Send SIGSTOP until all remaining processes are stopped, including those that start during the call.

    Raises TimeoutError after SECONDS.
    """
    _signal_until(signal.SIGSTOP, find, _is_stopped, f"processes of {whose} run after SIGSTOP")


def continue_all(find: Find) -> None:
    """Send SIGCONT to all processes that `find` returns."""
    for pid in find():
        _send(pid, signal.SIGCONT)


def _signal_until(number: signal.Signals, find: Find, is_done: Callable[[int], bool], failure: str) -> None:
    deadline = time.monotonic() + SECONDS
    signalled: set[int] = set()
    while True:
        found = {pid for pid in find() if pid not in signalled or not is_done(pid)}
        left = found | {pid for pid in signalled if not is_done(pid)}
        if not left:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{failure}, {SECONDS:.0f} s later: {', '.join(map(str, sorted(left)))}")
        for pid in found:  # only: the number of one that has ended may be another's now
            _send(pid, number)
        signalled |= found
        time.sleep(0.01)


def _is_gone(pid: int) -> bool:
    """Return whether a process has ended; a zombie counts as ended."""
    fields = stat_of(pid)
    return fields is None or fields[0] in "ZX"


def _is_stopped(pid: int) -> bool:
    """Return whether a process that received SIGSTOP has stopped or ended.

    A process that waits inside the kernel (D) counts as stopped, because it stops before it does anything else.
    After vfork it can be waiting for a child that is stopped itself.
    """
    fields = stat_of(pid)
    return fields is None or fields[0] in "TtDZX"


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _environment(pid: int) -> bytes:
    """Return the environment that a process was started with.

    A process appears to have no environment in the middle of execve. Kernel threads and zombies have no program, and never
    have one. Raises OSError if the process has ended or belongs to another user.
    """
    deadline = time.monotonic() + EXEC_SECONDS
    while not (environment := Path(f"/proc/{pid}/environ").read_bytes()):
        os.readlink(f"/proc/{pid}/exe")  # raises where there is no program
        process = (pid, (stat_of(pid) or [""] * (START_TIME + 1))[START_TIME])
        if process in _bare or time.monotonic() > deadline:
            _bare.add(process)
            break
        time.sleep(0.0002)
    return environment


_bare: set[tuple[int, str]] = set()
"""Processes found to have no environment, so that they are waited for only once."""


def _all() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())
