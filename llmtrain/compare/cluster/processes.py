"""Finding the processes of a host, and stopping, continuing or killing all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from llmtrain.compare.cluster.names import stat_of

SECONDS = 10.0
"""In which processes must have obeyed a signal that can't be refused."""
MARK = "LLMTRAIN_VIRTUAL_HOST"
"""Environment variable of what runs on a loopback host, whose processes have nothing else in common: torchrun gives each of
its ranks a session of its own."""

EXEC_READS = 100
"""Number of times that an empty environment is read again: execve fills it in well below the millisecond that this takes."""

Find = Callable[[], Collection[int]]
"""Looks for the processes of something, anew at each call."""


def in_namespace(namespace: Path) -> list[int]:
    """Processes in a network namespace, which is given by its file."""
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
    """Processes that were started with a mark, and the mark, as far as this user may see them."""
    found = {}
    start = f"{MARK}=".encode()
    for pid in _all():
        with contextlib.suppress(OSError):
            for variable in _environment(pid).split(b"\0"):
                if variable.startswith(start):
                    found[pid] = variable.removeprefix(start).decode(errors="replace")
    return found


def kill_all(find: Find, whose: str) -> None:
    """SIGKILL, until none is left, nor one that is on its way out, which `find` may no longer see. Raises TimeoutError after
    SECONDS."""
    _signal_until(signal.SIGKILL, find, _is_gone, f"processes of {whose} are there after SIGKILL")


def stop_all(find: Find, whose: str) -> None:
    """SIGSTOP, until all that are left are stopped, also those that others started meanwhile. Raises TimeoutError after
    SECONDS."""
    _signal_until(signal.SIGSTOP, find, _is_stopped, f"processes of {whose} run after SIGSTOP")


def continue_all(find: Find) -> None:
    """SIGCONT."""
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
    """Return whether a process has ended, though its parent may not have asked how."""
    fields = stat_of(pid)
    return fields is None or fields[0] in "ZX"


def _is_stopped(pid: int) -> bool:
    """Of a process that has got SIGSTOP. One that waits inside the kernel (D) stops before it does anything else; such a
    wait can be for a child that is stopped itself, after vfork."""
    fields = stat_of(pid)
    return fields is None or fields[0] in "TtDZX"


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _environment(pid: int) -> bytes:
    """Return what it was started with. In the middle of execve a process seems to have none for a moment; kernel threads and
    zombies, which have no program, have none for good. Raises OSError if it has ended or is another user's."""
    for _ in range(EXEC_READS):
        if environment := Path(f"/proc/{pid}/environ").read_bytes():
            return environment
        os.readlink(f"/proc/{pid}/exe")  # raises where there is no program
    return b""


def _all() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())
