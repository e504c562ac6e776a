"""Cluster names. A name identifies the cluster's creator, so that leftovers of dead processes can be found."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

PREFIX = "llmtrain"
_NAME = re.compile(rf"({PREFIX}-(?P<pid>\d+)-(?P<start>\d+)-\d+)(?:-.*)?")
_numbers = itertools.count()


def new_name() -> str:
    """Return `llmtrain-PID-START-NUMBER`: this process's pid and start time, and a new number at each call."""
    return f"{PREFIX}-{os.getpid()}-{start_of(os.getpid())}-{next(_numbers)}"


def cluster_of(name: str) -> str | None:
    """Return the cluster that `name` or `name-ANYTHING` belongs to, or None if it belongs to none."""
    match = _NAME.fullmatch(name)
    return match[1] if match else None


def owner_lives(cluster: str) -> bool:
    """Return whether the process that created a cluster still runs.

    A later process with the same pid has another start time, and does not count.
    """
    match = _NAME.fullmatch(cluster)
    return match is not None and start_of(int(match["pid"])) == int(match["start"])


def start_of(pid: int) -> int | None:
    """Return a process's start time in the kernel's clock ticks since boot, or None if it has ended."""
    fields = stat_of(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def stat_of(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on (field 3 of proc(5)), or None without such a process."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return line.rpartition(")")[2].split()  # the name before it may hold anything
