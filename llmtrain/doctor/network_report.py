"""Findings from the measured links between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.filesize import decimal

from llmtrain.doctor.finding import Finding, ok, problem, warning
from llmtrain.doctor.links import Link
from llmtrain.doctor.node_ranks import NodeRanks

SHOWN = 15
"""Number of links that are listed; if there are more, only the slowest are."""
SLOW = 0.5
"""Fraction of the median rate. A slower link gives a warning, because every synchronization waits for it."""
SKEW_SECONDS = 1.0
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def links_between(hosts: Sequence[NodeRanks], links: Sequence[Link]) -> list[Finding]:
    """Return findings on the reachability of every pair, then on latency, bandwidth and clocks."""
    broken, working = [link for link in links if link.error], [link for link in links if not link.error]
    findings = [
        problem(
            f"{hosts[link.there]} can't reach {hosts[link.here]}: {link.error}",
            f"open TCP between the hosts: MASTER_PORT and ports {_ephemeral_ports()}; or name the interface that leads there",
        )
        for link in broken
    ]
    if not working:
        return findings
    usual = median(_slower(link) for link in working)
    for link in sorted(working, key=_slower)[:SHOWN]:
        what = (
            f"{hosts[link.there]} to {hosts[link.here]}: {link.milliseconds:.2f} ms there and back, "
            f"{_per_second(link.sent)} sent, {_per_second(link.received)} received"
        )
        if _slower(link) < SLOW * usual:
            advice = f"the usual link has {_per_second(usual)}; every synchronization waits for the slowest"
            findings.append(warning(what, advice))
        else:
            findings.append(ok(what))
    if len(working) > SHOWN:
        findings.append(ok(f"{len(working) - SHOWN} more links, none of them slower; median {_per_second(usual)}"))
    return [*findings, *_clocks(hosts, working)]


def _clocks(hosts: Sequence[NodeRanks], links: Sequence[Link]) -> list[Finding]:
    findings = [
        warning(
            f"the clock of {hosts[link.here]} is {link.skew:+.1f} s off that of {hosts[link.there]}",
            "run an NTP client (chrony) on both; log lines and files of the hosts are hard to order otherwise",
        )
        for link in links
        if abs(link.skew) > SKEW_SECONDS
    ]
    largest = max(abs(link.skew) for link in links)
    return findings or [ok(f"clocks agree to {1000 * largest:.1f} ms")]


def _slower(link: Link) -> float:
    return min(link.sent, link.received)


def _per_second(rate: float) -> str:
    return f"{decimal(int(rate))}/s"


def _ephemeral_ports() -> str:
    try:
        return "-".join(EPHEMERAL_PORTS.read_text().split())
    except OSError:
        return "above 1024"
