"""Names of clusters. They say which process made one, so that what a dead process left behind can be told."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

PREFIX = "llmtrain"
_NAME = re.compile(rf"({PREFIX}-(?P<pid>\d+)-(?P<start>\d+)-\d+)(?:-.*)?")
_numbers = itertools.count()


def new_name() -> str:
    """`llmtrain-PID-START-NUMBER` with the pid and start time of this process, and another number at each call."""
    return f"{PREFIX}-{os.getpid()}-{start_of(os.getpid())}-{next(_numbers)}"


def cluster_of(name: str) -> str | None:
    """The cluster that `name` or `name-ANYTHING` belongs to; None for what is no cluster's."""
    match = _NAME.fullmatch(name)
    return match[1] if match else None


def owner_lives(cluster: str) -> bool:
    """Whether the process that made a cluster still runs. One that got the same pid later has another start time."""
    match = _NAME.fullmatch(cluster)
    return match is not None and start_of(int(match["pid"])) == int(match["start"])


def start_of(pid: int) -> int | None:
    """When a process started, in the kernel's clock ticks since boot; None if it has ended."""
    fields = stat_of(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def stat_of(pid: int) -> list[str] | None:
    """/proc/PID/stat from the state on (field 3 of proc(5)); None if there is no such process."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return line.rpartition(")")[2].split()  # the name before it may hold anything
