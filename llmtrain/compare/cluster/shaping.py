"""Bandwidth and latency of a network card, by the kernel's traffic control.

A token bucket (tbf) stands at both ends of a host's veth pair: the host's end shapes what it sends, the bridge's end what
it receives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmtrain.compare.cluster.limits import HostLimits
from llmtrain.compare.cluster.system import CommandError, run
from llmtrain.errors import ClusterError

BURST_SECONDS = 0.001
"""A bucket holds what the bandwidth carries in this time: that much of a message after a silence is free. Less, and what
passes while the kernel is late (a busy machine) is lost."""
SMALLEST_BURST = 8_192
QUEUE_SECONDS = 0.05
"""What waits for longer than this is dropped, as by a switch whose buffer is full."""
SMALLEST_QUEUE = 262_144
"""Some large packets of several senders."""
LARGEST_PACKET = 65_536
"""What TCP hands to a card that cuts messages into packets itself, as veth says it does."""
PACKETS_IN_BUCKET = 1.6
"""How many of the largest packets a bucket holds at least. One grows by 5 % when it is cut (headers); the rest is for a kernel
that is late: measured on a busy machine, a bucket of 1.08 packets carries 2 % less at 300 Mbit/s, one of 2.2 no more."""
NETEM_PACKETS = 100_000
CONGESTION_CONTROL = "reno"
"""Of TCP in all hosts, so that a comparison does not depend on the machine's default: bbr, for one, starts slowly and rests
now and then. The only one that every kernel has and lets namespaces choose."""


def burst_bytes(mbit: float) -> int:
    """Size of the bucket for a bandwidth."""
    return max(SMALLEST_BURST, round(mbit * 125_000 * BURST_SECONDS))


def queue_bytes(mbit: float) -> int:
    """How much may wait for a bandwidth."""
    return max(SMALLEST_QUEUE, round(mbit * 125_000 * QUEUE_SECONDS))


def largest_packet(limits: Sequence[HostLimits]) -> int:
    """Bytes that TCP may hand over at once on all cards of a cluster: what fits well into the smallest bucket of any.

    A larger one would be cut before a bucket, on a scarce CPU, and counters would then show the headers of each piece: 7 % with
    the acknowledgements. Uncut, they show one header for many pieces, and messages can be compared with counters. The
    buckets charge for all headers either way.
    """
    bursts = [burst_bytes(own.bandwidth_mbit) for own in limits if own.bandwidth_mbit is not None]
    return min([LARGEST_PACKET, *(math.floor(burst / PACKETS_IN_BUCKET) for burst in bursts)])


def shape(limits: HostLimits, host: tuple[str, str], port: tuple[str, str]) -> None:
    """Give a cable its limits. `host` and `port` are its ends: namespace and card. Raises ClusterError where the kernel can't."""
    for (namespace, card), disciplines in ((host, upload(limits)), (port, download(limits))):
        for discipline in disciplines:
            try:
                run("tc", "-n", namespace, "qdisc", "add", "dev", card, *discipline)
            except CommandError as error:
                raise ClusterError(_refusal(limits, discipline, error)) from None


def upload(limits: HostLimits) -> list[list[str]]:
    """Arguments of `tc qdisc add dev CARD` for what a host sends."""
    disciplines = download(limits)
    if limits.latency_ms is not None:
        place = ["parent", "1:1"] if disciplines else ["root"]
        delay = ["delay", f"{limits.latency_ms * 1000:.0f}us", "limit", str(NETEM_PACKETS)]
        disciplines.append([*place, "handle", "2:", "netem", *delay])
    return disciplines


def download(limits: HostLimits) -> list[list[str]]:
    """Arguments of `tc qdisc add dev CARD` for what a host receives: latency is on the sender's side."""
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
