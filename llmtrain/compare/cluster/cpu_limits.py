"""Shares of CPU time, by the kernel's control groups: version 1 (`cpu` mounted by itself) or 2 (one tree for all)."""

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
"""In every such period a host gets its share, then it stands still. Short beside a training step, so that steps see an even
slowdown and not a pause now and then."""
SHORTEST_QUOTA_US, LONGEST_PERIOD_US = 1_000, 1_000_000
"""The kernel's bounds."""
MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class Controller:
    """Where the kernel takes limits of CPU time: the top of its control groups."""

    top: Path
    version: int

    def make(self, cluster: str, host: str, cpus: float) -> Path:
        """A group with so many cores' time for a host. Returns the file into which its processes write their pid. Raises
        ClusterError where this may not be done."""
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
        """The groups of a cluster, and whatever still runs in them. Raises OSError if the kernel keeps one."""
        top = self.top / cluster
        for group in (*top.glob("*/"), top):
            kill_all(lambda group=group: _processes(group), f"control group {group}")
            _remove(group)

    def clusters(self) -> set[str]:
        """Those that have groups here."""
        return {name for path in self.top.iterdir() if (name := cluster_of(path.name)) is not None}

    def _hand_down(self, group: Path) -> None:
        """Let the groups below one have limits of CPU time (version 2 only)."""
        if "cpu" not in (group / "cgroup.subtree_control").read_text().split():
            (group / "cgroup.subtree_control").write_text("+cpu")


def controller() -> Controller | None:
    """The one of this machine; None where limits of CPU time can't be set at all."""
    try:
        mounts = MOUNTS.read_text()
    except OSError:
        return None
    return next((found for found in mounted(mounts) if _controls_cpu(found)), None)


def controller_or_refuse(cpus: float) -> Controller:
    """The one of this machine. Raises ClusterError where there is none."""
    found = controller()
    if found is None:
        raise ClusterError(f"cpus={cpus:g} of a host: no control group for CPU time is mounted here; leave cpus out")
    return found


def mounted(mountinfo: str) -> Iterator[Controller]:
    """Mounts in the text of /proc/PID/mountinfo that can hold limits of CPU time, version 1 first: where both are mounted,
    `cpu` is in the first."""
    lines = [line.split() for line in mountinfo.splitlines() if " - " in line]
    kinds = [(line[4], line[line.index("-") + 1], line[-1].split(",")) for line in lines]
    yield from (Controller(Path(place), 1) for place, kind, options in kinds if kind == "cgroup" and "cpu" in options)
    yield from (Controller(Path(place), 2) for place, kind, _ in kinds if kind == "cgroup2")


def quota_and_period(cpus: float) -> tuple[int, int]:
    """Microseconds of CPU time in so many microseconds. Raises ClusterError for a share too small for the kernel."""
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
    """A group can be busy for a moment after its last process has ended."""
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
