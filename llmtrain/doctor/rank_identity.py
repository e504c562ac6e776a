"""Ranks by host: where they are, whether their versions and recipes agree, and whether their messages are encrypted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmtrain.config import ParallelSection
from llmtrain.consistency import inconsistency
from llmtrain.doctor.finding import Finding, ok, problem, warning
from llmtrain.parallel.public_network import ADVICE, NodeAddress, find_unencrypted
from llmtrain.parallel.roll_call import format_ranks

MUST_AGREE = ("llmtrain", "torch")
"""Ranks that differ in these compute different things or cannot communicate."""


@dataclass(frozen=True)
class RankIdentity:
    """Description of a rank by itself, which all ranks gather."""

    rank: int
    node: str
    host: str
    interface: str
    address: str
    """Address to which other hosts connect."""
    device: str
    versions: dict[str, str]
    recipe: dict[str, str] = field(default_factory=dict)
    """Values of the keys that must be the same on all hosts."""


@dataclass(frozen=True)
class NodeRanks:
    """Ranks of one node; the first rank measures the node's links."""

    ranks: tuple[RankIdentity, ...]

    @property
    def leader(self) -> RankIdentity:
        return self.ranks[0]

    def __str__(self) -> str:
        return f"{self.leader.host} ({self.leader.address})"


def group(ranks: Sequence[RankIdentity]) -> list[NodeRanks]:
    """Return the ranks by node, ordered by each node's first rank."""
    nodes = dict.fromkeys(rank.node for rank in ranks)
    return [NodeRanks(tuple(rank for rank in ranks if rank.node == node)) for node in nodes]


def who_is_where(hosts: Sequence[NodeRanks]) -> list[Finding]:
    """Return a finding per node, and a warning if nodes have different numbers of ranks."""
    findings = []
    for host in hosts:
        devices = ", ".join(dict.fromkeys(rank.device for rank in host.ranks))
        who = format_ranks(rank.rank for rank in host.ranks)
        card = f", {host.leader.interface}" if len(hosts) > 1 else ""
        findings.append(ok(f"{host}{card}: {who} on {devices}"))
    sizes = Counter(len(host.ranks) for host in hosts)
    if len(sizes) > 1:
        shown = ", ".join(f"{count} with {size}" for size, count in sorted(sizes.items()))
        findings.append(
            warning(f"hosts have different numbers of ranks: {shown}", "start the same number of ranks on every host")
        )
    return findings


def agreement(ranks: Sequence[RankIdentity]) -> list[Finding]:
    """Return a finding for each version that differs between ranks, and one if recipes differ, or one finding that all agree.

    Different recipes, and different versions of what MUST_AGREE names, are problems. Other differences are warnings.
    """
    findings = []
    if differs := inconsistency([rank.recipe for rank in ranks], format_ranks):
        findings.append(
            problem(f"recipe differs: {differs}", "give every host the same recipe, its base files and overrides")
        )
    for name in ranks[0].versions:
        if differs := inconsistency([{name: rank.versions[name]} for rank in ranks], format_ranks):
            findings.append(
                (problem if name in MUST_AGREE else warning)(differs, f"install the same {name} on all hosts")
            )
    return findings or [ok(f"the same {', '.join([*ranks[0].versions, 'recipe'])} on all {len(ranks)} ranks")]


def encryption(hosts: Sequence[NodeRanks], parallel: ParallelSection) -> list[Finding]:
    """Return a warning if messages between nodes cross a public network unencrypted, unless the recipe allows that."""
    leaders = [host.leader for host in hosts]
    found = find_unencrypted([NodeAddress(rank.node, rank.host, rank.interface, rank.address) for rank in leaders])
    return [warning(found, ADVICE)] if found and not parallel.allow_unencrypted else []
