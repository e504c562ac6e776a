"""Bandwidth and latency of a network card, set with the kernel's traffic control.

Each end of a host's veth pair has a token bucket (tbf). The host's end shapes what it sends, the bridge's end what
it receives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmtrain.compare.cluster.limits import HostLimits
from llmtrain.compare.cluster.system import CommandError, run
from llmtrain.errors import ClusterError

BURST_SECONDS = 0.001
"""Bucket size in seconds at full bandwidth. After a silence, that much of a message passes unshaped. A smaller
bucket loses bandwidth whenever the kernel is late on a busy machine."""
SMALLEST_BURST = 8_192
QUEUE_SECONDS = 0.05
"""Packets that would wait longer than this are dropped, as by a switch with a full buffer."""
SMALLEST_QUEUE = 262_144
"""Room for a few large packets from several senders."""
LARGEST_PACKET = 65_536
"""Maximum bytes that TCP hands to a card with segmentation offload, which veth claims to have."""
PACKETS_IN_BUCKET = 1.6
"""Minimum number of the largest packets that a bucket holds. Segmentation makes a packet 5 % larger (headers); the
rest is slack for a kernel that is late. Measured on a busy machine, a bucket of 1.08 packets carries 2 % less at 300
Mbit/s, and one of 2.2 packets carries no more."""
NETEM_PACKETS = 100_000
CONGESTION_CONTROL = "reno"
"""TCP congestion control on all hosts, so that a comparison does not depend on the machine's default. bbr, for
example, starts slowly and pauses now and then. Only reno is in every kernel and available to namespaces."""


def burst_bytes(mbit: float) -> int:
    """Return the bucket size in bytes for a bandwidth."""
    return max(SMALLEST_BURST, round(mbit * 125_000 * BURST_SECONDS))


def queue_bytes(mbit: float) -> int:
    """Return the maximum number of bytes that may wait for a bandwidth."""
    return max(SMALLEST_QUEUE, round(mbit * 125_000 * QUEUE_SECONDS))


def largest_packet(limits: Sequence[HostLimits]) -> int:
    """Return the maximum bytes that TCP may hand over at once on any card of a cluster.

    They are limited to what fits well into the smallest bucket.

    A larger packet would be segmented before a bucket, which takes scarce CPU time. Counters would then include the
    headers of each piece: 7 % with the acknowledgments. Unsegmented, they include one header for many pieces, and
    messages can be compared with counters. The buckets charge for all headers in either case.
    """
    bursts = [burst_bytes(own.bandwidth_mbit) for own in limits if own.bandwidth_mbit is not None]
    return min([LARGEST_PACKET, *(math.floor(burst / PACKETS_IN_BUCKET) for burst in bursts)])


def shape(limits: HostLimits, host: tuple[str, str], port: tuple[str, str]) -> None:
    """Apply a host's limits to its cable, whose ends `host` and `port` are (namespace, card) pairs.

    Raises ClusterError if the kernel refuses a limit.
    """
    for (namespace, card), disciplines in ((host, upload(limits)), (port, download(limits))):
        for discipline in disciplines:
            try:
                run("tc", "-n", namespace, "qdisc", "add", "dev", card, *discipline)
            except CommandError as error:
                raise ClusterError(_refusal(limits, discipline, error)) from None


def upload(limits: HostLimits) -> list[list[str]]:
    """Return the argument lists of `tc qdisc add dev CARD` for what a host sends."""
    disciplines = download(limits)
    if limits.latency_ms is not None:
        place = ["parent", "1:1"] if disciplines else ["root"]
        delay = ["delay", f"{limits.latency_ms * 1000:.0f}us", "limit", str(NETEM_PACKETS)]
        disciplines.append([*place, "handle", "2:", "netem", *delay])
    return disciplines


def download(limits: HostLimits) -> list[list[str]]:
    """Return the argument lists of `tc qdisc add dev CARD` for what a host receives; the sender adds the latency."""
    mbit = limits.bandwidth_mbit
    if mbit is None:
        return []
    sizes = ["burst", str(burst_bytes(mbit)), "limit", str(queue_bytes(mbit))]
    return [["root", "handle", "1:", "tbf", "rate", f"{mbit * 1e6:.0f}bit", *sizes]]


def _refusal(limits: HostLimits, discipline: list[str], error: CommandError) -> str:
    if "netem" in discipline:
        asked, kind = f"latency_ms={limits.latency_ms:g}", "netem"
    else:
        asked, kind = f"bandwidth_mbit={limits.bandwidth_mbit:g}", "tbf"
    return f"{asked} of a host needs {kind}, which the kernel refuses ({error}); leave it out, or load the module sch_{kind}"
