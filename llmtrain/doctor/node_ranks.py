"""Placement of the ranks: each rank's description of itself, and whether the ranks agree where they must."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from llmtrain.config import Recipe
from llmtrain.doctor.finding import Finding, ok, problem, warning
from llmtrain.doctor.machine import identity
from llmtrain.parallel.rendezvous import format_ranks
from llmtrain.recipe_loader import resolved_yaml

MUST_AGREE = ("llmtrain", "torch", "recipe")
"""Ranks that differ in these compute different things or cannot communicate."""


@dataclass(frozen=True)
class RankIdentity:
    """Description that a rank gives of itself."""

    rank: int
    node: str
    host: str
    interface: str
    address: str
    """Address to which other hosts connect."""
    device: str
    versions: dict[str, str]


@dataclass(frozen=True)
class NodeRanks:
    """The ranks of one node; the first one measures links for the node."""

    index: int
    ranks: tuple[RankIdentity, ...]

    @property
    def leader(self) -> RankIdentity:
        return self.ranks[0]

    def __str__(self) -> str:
        return f"{self.leader.host} ({self.leader.address})"


def versions(recipe: Recipe | None) -> dict[str, str]:
    """Return the versions and the recipe hash of this rank, for comparison with other ranks."""
    recipe_hash = hashlib.sha256(resolved_yaml(recipe).encode()).hexdigest()[:12] if recipe else "none"
    return {**identity(), "recipe": recipe_hash}


def group(ranks: Sequence[RankIdentity]) -> list[NodeRanks]:
    """Return the ranks by node, ordered by each node's first rank."""
    nodes = list(dict.fromkeys(rank.node for rank in ranks))
    return [NodeRanks(index, tuple(rank for rank in ranks if rank.node == node)) for index, node in enumerate(nodes)]


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
        findings.append(warning(f"hosts have different numbers of ranks: {shown}", "start as many on every host"))
    return findings


def agreement(ranks: Sequence[RankIdentity]) -> list[Finding]:
    """Return a finding for each version that differs between ranks, or one finding that all agree.

    A difference is a problem if its name is in MUST_AGREE, and a warning otherwise.
    """
    findings = []
    for name in ranks[0].versions:
        values: dict[str, list[int]] = {}
        for rank in ranks:
            values.setdefault(rank.versions[name], []).append(rank.rank)
        if len(values) == 1:
            continue
        what = f"{name} differs: " + "; ".join(f"{value} on {format_ranks(who)}" for value, who in values.items())
        if name == "recipe":
            findings.append(problem(what, "give every host the same recipe, its base files and overrides"))
        elif name in MUST_AGREE:
            findings.append(problem(what, f"install the same {name} on all hosts"))
        else:
            findings.append(warning(what, f"install the same {name} on all hosts"))
    return findings or [ok(f"the same {', '.join(ranks[0].versions)} on all {len(ranks)} ranks")]
