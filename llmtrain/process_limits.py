"""CPU cores and memory that this process may use: those of the machine, or fewer if its affinity or its cgroups limit them.
Containers and Slurm set their limits in cgroups. Imports no torch."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
MEMORY_LIMITS = (("", "memory.max"), ("memory", "memory.limit_in_bytes"))
"""Controller and file of the memory limit, in cgroups of version 2 and of version 1."""


def usable_cores() -> int:
    """Return the number of CPU cores in this process's affinity, or fewer if a cgroup of version 2 has a smaller CPU quota. A
    quota is rounded down to whole cores, but not below one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups(""):
        with suppress(OSError, ValueError):  # no limit here, or "max"
            quota, period = map(int, (folder / "cpu.max").read_text(encoding="utf-8").split())
            cores = min(cores, max(1, quota // period))
    return cores


def usable_memory() -> int:
    """Return the bytes of the machine's memory, or fewer if a cgroup has a smaller limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for controller, name in MEMORY_LIMITS:
        for folder in _cgroups(controller):
            with suppress(OSError, ValueError):  # no limit here, or "max"
                limits.append(int((folder / name).read_text(encoding="utf-8")))
    return min(limits)


def _cgroups(controller: str) -> list[Path]:
    """Return the folders of this process's cgroup and of its parents. "" is the only controller of version 2."""
    root = CGROUPS / controller
    with suppress(OSError):
        for line in MEMBERSHIP.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                innermost = root / path.lstrip("/")
                return [folder for folder in (innermost, *innermost.parents) if folder.is_relative_to(root)]
    return []
