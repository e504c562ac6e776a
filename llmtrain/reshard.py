"""Resharding of plain values: rules that compute a rank's values on the present mesh from the values of the ranks that wrote a
checkpoint. docs/resume.md lists the rules in a table.

If only the number of shards changes, training continues as before, with per-rank counts redistributed within each replica. If
the number of replicas changes, all new replicas start from the mean of the old ones and keep the state that replicas share.

A rank's *sources* are the old ranks whose values it combines: those of its own replica or, if the number of replicas has
changed, all old ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from llmtrain.quantities import counted, mesh_size

T = TypeVar("T")
SUMMED = ("error",)
"""Kinds of per-replica tensors whose sum over replicas is kept, instead of the mean: the rounding errors of error feedback. They
are added to messages that are already divided by the number of replicas, so each new replica takes an equal part of the
old sum."""


@dataclass(frozen=True)
class MeshChange:
    """Change from a mesh of `old_replicas` x `old_shards` ranks to a mesh of `replicas` x `shards`, as seen by the rank at the
    position (`replica`, `shard`) of the new mesh."""

    old_replicas: int
    old_shards: int
    replicas: int
    shards: int
    replica: int
    shard: int
    global_step: int = 0
    """Global step at which the checkpoint was written."""
    old_global_batch: int | None = None
    """Sequences per step of the run that wrote the checkpoint; None if it has not changed."""

    @property
    def is_identity(self) -> bool:
        """True if the mesh has the same shape as the mesh that wrote the checkpoint."""
        return not self.replicas_changed and self.old_shards == self.shards

    @property
    def replicas_changed(self) -> bool:
        """True if the number of replicas differs from the checkpoint's."""
        return self.old_replicas != self.replicas

    @property
    def source_replicas(self) -> list[int]:
        """Old replicas whose mean this rank's replica starts from."""
        return list(range(self.old_replicas)) if self.replicas_changed else [self.replica]

    @property
    def same_rank(self) -> int | None:
        """Old rank at this rank's position in the mesh; None if the old mesh had no such position."""
        existed = self.replica < self.old_replicas and self.shard < self.old_shards
        return self.replica * self.old_shards + self.shard if existed else None

    @property
    def recipients(self) -> tuple[int, int]:
        """Pair (number of new ranks with the same sources as this rank, index of this rank among them)."""
        if not self.replicas_changed:
            return self.shards, self.shard
        return self.replicas * self.shards, self.replica * self.shards + self.shard

    def factor(self, kind: str) -> float:
        """Return the factor that multiplies the old replicas' mean of the tensors of this `kind`, such as "error"."""
        return self.old_replicas / self.replicas if kind in SUMMED else 1.0

    def describe(self) -> str:
        """Return a short description for the console; empty if nothing changes."""
        if self.is_identity:
            return ""
        written = f", written by {mesh_size(self.old_replicas, self.old_shards)}"
        if not self.replicas_changed:
            same = "replica" if self.replicas == 1 else "replicas"
            return f"{written}: the same {same} on {counted(self.shards, 'shard')}"
        start = f"{self.replicas} replicas start" if self.replicas > 1 else "1 replica starts"
        return f"{written}: {start} from their mean" if self.old_replicas > 1 else f"{written}: {start} from it"

    def apply(self, rules: Rules, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return this rank's values by name, given those of all old ranks. `rules` must have an entry for every name."""
        from_all = {name: rule for name, rule in rules.items() if isinstance(rule, FromAllRanks)}
        values = {name: rule.combine(self, [rank[name] for rank in ranks]) for name, rule in from_all.items()}
        if self.is_identity:
            return ranks[self.replica * self.shards + self.shard] | values
        sources = [ranks[r * self.old_shards + s] for r in self.source_replicas for s in range(self.old_shards)]
        rest = [{name: value for name, value in source.items() if name not in from_all} for source in sources]
        return _combine({name: rule for name, rule in rules.items() if name not in from_all}, self, rest) | values


Rule = Callable[[MeshChange, list], Any]
"""Function from (mesh change, values of a rank's sources) to the rank's own value."""


@dataclass(frozen=True)
class FromAllRanks:
    """Rule that receives the values of all old ranks, not only of the sources, even if the mesh has not changed. Only for
    entries at the top level of a state."""

    combine: Rule


Rules = Mapping[str, "Rule | FromAllRanks | Rules"]
"""Rules by name, nested like the state that they reshard."""


def resharded(default: T, by: Rule) -> T:
    """Declare a dataclass field with a `default` that checkpoints store and that the rule `by` reshards."""
    return field(default=default, metadata={"reshard": by})


def rules_of(cls: type) -> dict[str, Rule]:
    """Return the rules that the fields of a dataclass declare. Fields without a rule are not stored."""
    return {entry.name: entry.metadata["reshard"] for entry in fields(cls) if "reshard" in entry.metadata}


def by_replica(combine: Callable[[list], T]) -> Rule:
    """Return a rule for values that all ranks of a replica share. It keeps the value if only the shards change, and otherwise
    returns `combine` of a list with one value per old replica."""
    return lambda change, values: combine(values[:: change.old_shards]) if change.replicas_changed else values[0]


def first(change: MeshChange, values: list) -> Any:
    """Return the first value, for values that all ranks share."""
    return values[0]


def own_step(change: MeshChange, values: list) -> int:
    """Return this replica's step: its own if the number of replicas has not changed, otherwise the run's global step."""
    return change.global_step if change.replicas_changed else values[0]


def mean(change: MeshChange, values: list) -> float:
    """Return the mean, for values whose mean over ranks is logged. Equal values are returned unchanged, bit for bit."""
    return values[0] if all(value == values[0] for value in values) else sum(values) / len(values)


def largest(change: MeshChange, values: list) -> float:
    """Return the largest value, for values whose maximum over ranks is logged."""
    return max(values)


def split_evenly(change: MeshChange, values: list) -> float:
    """Return this rank's equal part of the sum, for values whose sum over ranks is logged. Integers stay integers."""
    count, index = change.recipients
    total = sum(values)
    return total // count + (index < total % count) if isinstance(total, int) else total / count


def mean_over_replicas(change: MeshChange, values: list) -> float:
    """Return this replica's equal part of the sum over replicas, for values whose sum over replicas is logged. All ranks of a
    replica hold the replica's value."""
    return sum(values) / change.old_shards / (change.replicas if change.replicas_changed else 1)


def sum_over_shards(change: MeshChange, values: list) -> float:
    """Return this rank's equal part of the replicas' mean, for values that are summed over shards and whose mean over
    replicas is logged. Each rank holds the value of its shard."""
    return sum(values) / len(change.source_replicas) / change.shards


def require_equal(states: Sequence[T]) -> T:
    """Return the state that all replicas share, and assert that all have the same. State that differs between replicas needs
    another rule."""
    assert all(state == states[0] for state in states), f"replicas differ in what they should share: {states}"
    return states[0]


def _combine(rules: Rules, change: MeshChange, values: Sequence[dict[str, Any]]) -> dict[str, Any]:
    missing = values[0].keys() ^ rules.keys()
    assert not missing, f"{missing} has either no value or no rule that says what becomes of it on another mesh"
    combined: dict[str, Any] = {}
    for name, rule in rules.items():
        inner = [value[name] for value in values]
        combined[name] = rule(change, inner) if callable(rule) else _combine(rule, change, inner)
    return combined
