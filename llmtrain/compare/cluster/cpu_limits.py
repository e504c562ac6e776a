"""Limits of CPU time through control groups, version 1 (`cpu` has its own mount) or 2 (one tree for all)."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmtrain.compare.cluster.names import cluster_of
from llmtrain.compare.cluster.processes import kill_all
from llmtrain.errors import ClusterError

PERIOD_US = 20_000
"""Microseconds in which a host runs for its share and is then throttled. Short compared with a training step, so
that steps slow down evenly instead of pausing now and then."""
SHORTEST_QUOTA_US, LONGEST_PERIOD_US = 1_000, 1_000_000
"""The kernel's bounds in microseconds."""
MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class Controller:
    """Control-group hierarchy that limits CPU time; `top` is the folder of its root group."""

    top: Path
    version: int

    def make(self, cluster: str, host: str, cpus: float) -> Path:
        """Create a control group for a host with the CPU time of `cpus` cores.

        Returns the file to which a process writes its pid to join. Raises ClusterError if control groups can't be
        written, or the share is too small for the kernel.
        """
        quota, period = quota_and_period(cpus)
        group = self.top / cluster / host
        try:
            if self.version == 2:
                self._hand_down(self.top)
            group.parent.mkdir(exist_ok=True)
            if self.version == 2:
                self._hand_down(group.parent)
            group.mkdir()
            if self.version == 2:
                (group / "cpu.max").write_text(f"{quota} {period}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(period))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
        except OSError as error:
            raise ClusterError(
                f"cpus={cpus:g} of {host}: limits of CPU time can't be set below {self.top} "
                f"({error.strerror}); leave them out, or start where control groups may be written"
            ) from None
        return group / "cgroup.procs"

    def remove(self, cluster: str) -> None:
        """Remove the groups of a cluster and kill the processes in them. Raises OSError if the kernel keeps a group."""
        top = self.top / cluster
        for group in (*top.glob("*/"), top):
            kill_all(lambda group=group: _processes(group), f"control group {group}")
            _remove(group)

    def clusters(self) -> set[str]:
        """Return the clusters that have groups in this hierarchy."""
        return {name for path in self.top.iterdir() if (name := cluster_of(path.name)) is not None}

    def _hand_down(self, group: Path) -> None:
        """Enable limits of CPU time for the groups below this one (version 2 only)."""
        if "cpu" not in (group / "cgroup.subtree_control").read_text().split():
            (group / "cgroup.subtree_control").write_text("+cpu")


def controller() -> Controller | None:
    """Return this machine's controller, or None if CPU time can't be limited."""
    try:
        mounts = MOUNTS.read_text()
    except OSError:
        return None
    return next((found for found in mounted(mounts) if _controls_cpu(found)), None)


def controller_or_refuse(cpus: float) -> Controller:
    """Return this machine's controller. Raises ClusterError if there is none."""
    found = controller()
    if found is None:
        raise ClusterError(f"cpus={cpus:g} of a host: no control group for CPU time is mounted here; leave cpus out")
    return found


def mounted(mountinfo: str) -> Iterator[Controller]:
    """Yield the mounts in the text of /proc/PID/mountinfo that may limit CPU time.

    Version 1 comes first, because it has the `cpu` controller if both versions are mounted.
    """
    lines = [line.split() for line in mountinfo.splitlines() if " - " in line]
    kinds = [(line[4], line[line.index("-") + 1], line[-1].split(",")) for line in lines]
    yield from (Controller(Path(place), 1) for place, kind, options in kinds if kind == "cgroup" and "cpu" in options)
    yield from (Controller(Path(place), 2) for place, kind, _ in kinds if kind == "cgroup2")


def quota_and_period(cpus: float) -> tuple[int, int]:
    """Return (quota, period) in microseconds for the time of `cpus` cores.

    Raises ClusterError for a share too small for the kernel.
    """
    period = max(PERIOD_US, math.ceil(SHORTEST_QUOTA_US / cpus))
    if period > LONGEST_PERIOD_US:
        smallest = SHORTEST_QUOTA_US / LONGEST_PERIOD_US
        raise ClusterError(f"cpus={cpus:g} of a host: the kernel can't give less than {smallest:g}")
    return round(cpus * period), period


def _controls_cpu(found: Controller) -> bool:
    if found.version == 1:
        return True
    try:
        return "cpu" in (found.top / "cgroup.controllers").read_text().split()
    except OSError:
        return False


def _processes(group: Path) -> list[int]:
    try:
        return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
    except OSError:  # the group is gone
        return []


def _remove(group: Path) -> None:
    """Remove a group, retrying for 5 s, because a group can be busy for a moment after its last process has ended."""
    deadline = time.monotonic() + 5
    while True:
        try:
            with contextlib.suppress(FileNotFoundError):
                group.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
