"""Limits of a host: bandwidth by the kernel's traffic control, latency and loss by a switch in user space, CPU time by
control groups.

Each end of a host's veth pair has a token bucket (tbf), the host's end for sent packets, the switch's end for received
ones. If a host of the cluster has latency or loss, `frame_switch` takes the place of the bridge. Control groups have
version 1 (`cpu` has its own mount) or 2 (one tree for all controllers).
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
from pydantic import Field, PositiveFloat

from llmtrain.compare.cluster.processes import CommandError, is_of_other_namespace, run, signal_all
from llmtrain.config import Section
from llmtrain.errors import ClusterError

BURST_SECONDS = 0.001
"""Bucket size in seconds at full bandwidth. After a pause, that much of a message passes unshaped. A smaller
bucket loses bandwidth whenever the kernel is late on a busy machine."""
SMALLEST_BURST = 8_192
QUEUE_SECONDS = 0.05
"""Maximum seconds that a packet waits in a buffer. A packet that would wait longer is dropped, as by a switch with a
full buffer. With latency, the maximum is at least a round trip, the usual rule for routers."""
SMALLEST_QUEUE = 262_144
"""Minimum bytes that a queue holds: a few large packets from several senders."""
LARGEST_PACKET = 65_536
"""Maximum bytes that TCP hands to a card with segmentation offload, which veth claims to have."""
PACKETS_IN_BUCKET = 1.6
"""Minimum number of the largest packets that a bucket holds. Segmentation makes a packet 5 % larger (headers); the
rest is slack for a kernel that is late. Measured on a busy machine, a bucket of 1.08 packets carries 2 % less at 300
Mbit/s, and one of 2.2 packets carries no more."""
FRAME = 2_048
"""Maximum bytes that TCP hands to a card at once if packets are lost: one Ethernet frame and slack, so that each is lost
on its own."""
PERIOD_US = 20_000
"""Microseconds of a period, in which a host runs for its share and is then throttled. A period is short compared with a
training step, so that steps slow down evenly instead of pausing now and then."""
SHORTEST_QUOTA_US, LONGEST_PERIOD_US = 1_000, 1_000_000
"""The kernel's bounds in microseconds."""
BUSY_SECONDS = 5.0
"""Timeout for the removal of a control group, which can be busy for a moment after its last process has ended."""


class HostLimits(Section):
    """Limits of one host; None means no limit."""

    bandwidth_mbit: PositiveFloat | None = None
    """Mbit/s of each network card in each direction, including headers (TCP carries 4.3 % less, as on real cards)."""
    downlink_mbit: PositiveFloat | None = None
    """Mbit/s in the receiving direction, if it differs from `bandwidth_mbit`."""
    latency_ms: PositiveFloat | None = None
    """Milliseconds by which each sent packet is delayed."""
    loss: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Probability with which each sent packet is lost."""
    cpus: PositiveFloat | None = None
    """CPU time of all its processes together, in cores; 0.5 is half a core."""

    @property
    def received_mbit(self) -> float | None:
        """Return the Mbit/s in the receiving direction."""
        return self.downlink_mbit or self.bandwidth_mbit

    @property
    def queue_seconds(self) -> float:
        """Return the time that a packet may wait for its turn on the cable."""
        return max(QUEUE_SECONDS, 2 * (self.latency_ms or 0.0) / 1000)

    @property
    def needs_delay_switch(self) -> bool:
        """Return whether its packets are delayed or lost."""
        return self.latency_ms is not None or self.loss is not None


def burst_bytes(mbit: float) -> int:
    """Return the bucket size in bytes for a bandwidth."""
    return max(SMALLEST_BURST, round(mbit * 125_000 * BURST_SECONDS))


def largest_packet(limits: Sequence[HostLimits]) -> int:
    """Return the maximum bytes that TCP may pass to a card at once, for all cards of a cluster.

    A packet of that size fits well into the smallest bucket. A larger packet would be segmented before a bucket, which
    takes scarce CPU time. Counters would then include the headers of each piece: 7 % with the acknowledgments. For an
    unsegmented packet they include one header for many pieces, so messages can be compared with counters. The buckets
    charge for all headers in either case.
    """
    if any(own.loss for own in limits):
        return FRAME
    rates = [mbit for own in limits for mbit in (own.bandwidth_mbit, own.received_mbit)]
    bursts = [burst_bytes(mbit) for mbit in rates if mbit is not None]
    return min([LARGEST_PACKET, *(math.floor(burst / PACKETS_IN_BUCKET) for burst in bursts)])


def shape(limits: HostLimits, host: tuple[str, str], port: tuple[str, str]) -> None:
    """Apply a host's bandwidth to its cable, whose ends `host` and `port` are (namespace, card) pairs.

    Raises ClusterError if the kernel refuses it.
    """
    for (namespace, card), mbit in zip((host, port), (limits.bandwidth_mbit, limits.received_mbit), strict=True):
        if mbit is None:
            continue
        try:
            run("tc", "-n", namespace, "qdisc", "add", "dev", card, *token_bucket(mbit, limits.queue_seconds).split())
        except CommandError as error:
            raise ClusterError(
                f"bandwidth_mbit={mbit:g} of a host needs tbf, which the kernel refuses ({error}); leave it out, or load "
                "the module sch_tbf"
            ) from None


def token_bucket(mbit: float, queue_seconds: float = QUEUE_SECONDS) -> str:
    """Return the arguments of `tc qdisc add dev CARD` for a bandwidth."""
    queue = max(SMALLEST_QUEUE, round(mbit * 125_000 * queue_seconds))
    return f"root handle 1: tbf rate {mbit * 1e6:.0f}bit burst {burst_bytes(mbit)} limit {queue}"


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
        period = max(PERIOD_US, math.ceil(SHORTEST_QUOTA_US / cpus))
        if period > LONGEST_PERIOD_US:
            smallest = SHORTEST_QUOTA_US / LONGEST_PERIOD_US
            raise ClusterError(f"cpus={cpus:g} of a host: the kernel can't give less than {smallest:g}")
        quota = round(cpus * period)
        group = self.top / cluster / host
        try:
            group.parent.mkdir(exist_ok=True)
            if self.version == 2:
                for parent in (self.top, group.parent):
                    control = parent / "cgroup.subtree_control"
                    if "cpu" not in control.read_text(encoding="utf-8").split():
                        control.write_text("+cpu", encoding="utf-8")
            group.mkdir()
            if self.version == 2:
                (group / "cpu.max").write_text(f"{quota} {period}", encoding="utf-8")
            else:
                (group / "cpu.cfs_period_us").write_text(str(period), encoding="utf-8")
                (group / "cpu.cfs_quota_us").write_text(str(quota), encoding="utf-8")
        except OSError as error:
            raise ClusterError(
                f"cpus={cpus:g} of {host}: limits of CPU time can't be set below {self.top} "
                f"({error.strerror}); leave them out, or start where control groups may be written"
            ) from None
        return group / "cgroup.procs"

    def is_foreign(self, cluster: str) -> bool:
        """Return whether a group of a cluster contains a process of another PID namespace, as in a container. It is then
        unknown here whether the cluster's creator is alive, and signaling the listed pids could end this process."""
        groups = (self.top / cluster).glob("*/")
        return any(is_of_other_namespace(pid) for group in groups for pid in _processes(group))

    def remove(self, cluster: str) -> None:
        """Remove the groups of a cluster and kill the processes in them. Raises OSError if the kernel keeps a group."""
        top = self.top / cluster
        for group in (*top.glob("*/"), top):
            signal_all(signal.SIGKILL, lambda group=group: _processes(group), f"control group {group}")
            deadline = time.monotonic() + BUSY_SECONDS
            while group.exists():
                try:
                    group.rmdir()
                except OSError:
                    if group.exists() and time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)


def controller() -> Controller | None:
    """Return this machine's controller, or None if CPU time can't be limited.

    Version 1 comes first, because it has the `cpu` controller if both versions are mounted.
    """
    with suppress(OSError):  # no /proc
        for mount in sorted(psutil.disk_partitions(all=True), key=lambda mount: mount.fstype):
            top = Path(mount.mountpoint)
            if mount.fstype == "cgroup" and "cpu" in mount.opts.split(","):
                return Controller(top, 1)
            with suppress(OSError):
                if (
                    mount.fstype == "cgroup2"
                    and "cpu" in (top / "cgroup.controllers").read_text(encoding="utf-8").split()
                ):
                    return Controller(top, 2)
    return None


def _processes(group: Path) -> list[int]:
    try:
        return [int(pid) for pid in (group / "cgroup.procs").read_text(encoding="utf-8").split()]
    except OSError:  # the group is gone
        return []
