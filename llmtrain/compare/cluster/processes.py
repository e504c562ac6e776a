"""Processes of clusters: finding and signaling them, and cluster names, which identify the creating process.

A cluster is called `llmtrain-PID-START-NUMBER`: its creator's pid and start time, and a new number for each cluster. A
host's resources, such as its namespace, are called `CLUSTER-hostK`. Leftovers of dead processes can thus be found.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import psutil

PREFIX = "llmtrain"
MARK = "LLMTRAIN_VIRTUAL_HOST"
"""Environment variable that identifies the processes of a host. On loopback they have nothing else in common, because
torchrun gives each of its ranks its own session."""
SECONDS = 10.0
"""Maximum seconds until processes obey SIGKILL or SIGSTOP, which they can't ignore."""
EXEC_SECONDS = 1.0
"""Maximum seconds that execve may leave an environment empty. A busy machine suspends processes in the middle of it."""
COMMAND_SECONDS = 30.0
"""Timeout of one `ip` or `tc` command on a busy machine."""
ENDED = "ZX"
"""States of a process that has ended: zombie, dead."""
OBEYED = {signal.SIGKILL: ENDED, signal.SIGSTOP: f"TtD{ENDED}"}
"""States of a process that has obeyed a signal.

A process that waits inside the kernel (D) counts as stopped, because it stops before it does anything else. After vfork
it can be waiting for a child that is stopped itself.
"""
_numbers = itertools.count()
_bare: set[tuple[int, int | None]] = set()
"""(pid, start time) of processes found to have no environment, so that they are waited for only once."""


class CommandError(RuntimeError):
    """Failure of a system program."""


def run(*command: str) -> str:
    """Run a system program and return its standard output.

    Raises CommandError with its error output if it fails, and also if it does not end in time.
    """
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        raise CommandError(f"{' '.join(command)}: did not end within {COMMAND_SECONDS:.0f} s") from None
    if done.returncode:
        raise CommandError(f"{' '.join(command)}: {' '.join(done.stderr.split())}")
    return done.stdout


def new_name() -> str:
    """Return a name for a cluster of this process."""
    return f"{PREFIX}-{os.getpid()}-{start_of(os.getpid())}-{next(_numbers)}"


def cluster_of(name: str) -> str | None:
    """Return the cluster that `name` or `name-ANYTHING` belongs to, or None if it belongs to none."""
    match = re.fullmatch(rf"({PREFIX}-\d+-\d+-\d+)(-.*)?", name)
    return match[1] if match else None


def owner_lives(cluster: str) -> bool:
    """Return whether the process that created a cluster still runs. A later process with its pid does not count."""
    _, pid, start, _ = cluster.split("-")
    return start_of(int(pid)) == int(start)


def start_of(pid: int) -> int | None:
    """Return a process's start time in the kernel's clock ticks since boot, or None if it has ended."""
    fields = stat_of(pid)
    return None if fields[0] in ENDED else int(fields[19])


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on (field 3 of proc(5)), or only X if it does not exist."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return ["X"]
    return line.rpartition(")")[2].split()  # the name before it may contain anything


def in_namespace(file: Path) -> list[int]:
    """Return the processes in the network namespace with this file."""
    found: list[int] = []
    with suppress(FileNotFoundError):
        wanted = file.stat()
        for pid in psutil.pids():
            with suppress(OSError):  # it has ended
                if os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), wanted):
                    found.append(pid)
    return found


def marks() -> dict[int, str]:
    """Return {pid: mark} for the processes with a mark in an environment that this user may read. Processes of another
    PID namespace, as in a container, are left out, because the pids in their marks belong to that namespace."""
    found = {}
    for pid in psutil.pids():
        with suppress(OSError):
            if is_of_other_namespace(pid):
                continue
            if match := re.search(rb"(?:^|\0)%s=([^\0]*)" % MARK.encode(), _environment(pid)):
                found[pid] = match[1].decode(errors="replace")
    return found


def is_of_other_namespace(pid: int) -> bool:
    """Return whether a process is of another PID namespace, as in a container. Control groups of version 2 list one as pid 0."""
    with suppress(OSError):  # it has ended
        return pid == 0 or not os.path.samestat(os.stat(f"/proc/{pid}/ns/pid"), os.stat("/proc/self/ns/pid"))
    return False


def signal_all(number: signal.Signals, find: Callable[[], Collection[int]], whose: str) -> None:
    """Send SIGKILL or SIGSTOP until all processes have obeyed. Raises TimeoutError after SECONDS.

    `find` looks up the pids anew at each call. Processes that start while this function runs are included, and so are
    exiting processes that `find` no longer returns.
    """
    deadline = time.monotonic() + SECONDS
    signaled: set[int] = set()
    while True:
        found = set(find())
        left = {pid for pid in found | signaled if pid not in signaled or stat_of(pid)[0] not in OBEYED[number]}
        if not left:
            return
        if time.monotonic() > deadline:
            pids = ", ".join(map(str, sorted(left)))
            raise TimeoutError(f"processes of {whose} have not obeyed {number.name}, {SECONDS:.0f} s later: {pids}")
        for pid in left & found:  # only these, because the pid of an ended process may belong to another one now
            send(pid, number)
        signaled |= found
        time.sleep(0.01)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _environment(pid: int) -> bytes:
    """Return the environment with which a process was started.

    A process appears to have no environment in the middle of execve. Kernel threads and zombies have no program, and
    never have an environment. Raises OSError if the process has ended or belongs to another user.
    """
    deadline = time.monotonic() + EXEC_SECONDS
    while not (environment := Path(f"/proc/{pid}/environ").read_bytes()):
        os.readlink(f"/proc/{pid}/exe")  # raises if it has no program
        process = (pid, start_of(pid))
        if process in _bare or time.monotonic() > deadline:
            _bare.add(process)
            break
        time.sleep(0.0002)
    return environment
