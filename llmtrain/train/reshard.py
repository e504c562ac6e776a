"""Resharding: which ranks and replicas of a checkpoint a rank continues from on another mesh, and by which
rule. docs/resume.md has the rules as a table.

If only the shards change, training continues as before: tensors are split anew, and per-rank counts are
redistributed within each replica. If the number of replicas changes, all new replicas start from the mean of
the old ones. Shared state is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llmtrain.data.cursor import merge_cursors
from llmtrain.parallel.mesh import Mesh
from llmtrain.sync.method import Method

SUMMED = ("error",)
"""Per-replica tensors that are summed instead of averaged. Rounding errors are added to messages that are
already weighted, so each new replica takes an equal part of the old replicas' sum."""


@dataclass(frozen=True)
class MeshChange:
    """Change from a mesh of `old_replicas` x `old_shards` ranks to this rank's place in the current mesh."""

    old_replicas: int
    old_shards: int
    replicas: int
    shards: int
    replica: int
    shard: int

    @classmethod
    def onto(cls, mesh: Mesh, written_by: Sequence[int]) -> MeshChange:
        """Create the change from `written_by`, the old (replicas, shards), to `mesh`."""
        return cls(*written_by, mesh.replicas, mesh.shard.size, mesh.replica.rank, mesh.shard.rank)

    @property
    def is_identity(self) -> bool:
        """Return whether the mesh has the shape of the one that wrote the checkpoint."""
        return not self.replicas_changed and self.old_shards == self.shards

    @property
    def replicas_changed(self) -> bool:
        """Return whether the number of replicas differs from that of the checkpoint."""
        return self.old_replicas != self.replicas

    @property
    def source_replicas(self) -> list[int]:
        """Return the old replicas whose mean this rank's replica starts from."""
        return list(range(self.old_replicas)) if self.replicas_changed else [self.replica]

    @property
    def same_rank(self) -> int | None:
        """Return the old rank at this rank's place in the mesh, or None if it did not exist."""
        there = self.replica < self.old_replicas and self.shard < self.old_shards
        return self.replica * self.old_shards + self.shard if there else None

    def factor(self, kind: str) -> float:
        """Return the factor by which the mean of the old replicas' tensors of this kind is multiplied."""
        return self.old_replicas / self.replicas if kind in SUMMED else 1.0

    def describe(self) -> str:
        """Return a short description for the console; empty if nothing changes."""
        if self.is_identity:
            return ""
        written = f", written by {self.old_replicas} replicas x {self.old_shards} shards"
        if not self.replicas_changed:
            return f"{written}: the same replicas on {self.shards} shards"
        start = f"{self.replicas} replicas start" if self.replicas > 1 else "1 replica starts"
        return f"{written}: {start} from their mean" if self.old_replicas > 1 else f"{written}: {start} from it"

    def progress(self, ranks: Sequence[dict[str, Any]], step: int, global_batch: int, method: Method) -> dict[str, Any]:
        """Return this rank's plain values, combined from those of all old ranks. `step` is the global step."""
        if self.is_identity:
            return ranks[self.replica * self.shards + self.shard]
        old = [ranks[replica * self.old_shards + s] for replica in self.source_replicas for s in range(self.old_shards)]
        progress = self._combined(RULES, old)
        of_replicas = old[:: self.old_shards]
        methods = [rank["method"] for rank in of_replicas]
        if self.replicas_changed:
            progress |= {"step": step, "loader": merge_cursors([rank["loader"] for rank in of_replicas], global_batch)}
            progress["method"] |= method.resharded(methods)
        else:
            progress |= {"step": old[0]["step"], "loader": old[0]["loader"]}
            progress["method"] |= {name: methods[0][name] for name in ("period", "schedule")}
        return progress

    def _combined(self, rules: dict[str, Any], old: Sequence[dict[str, Any]]) -> dict[str, Any]:
        without_a_rule = old[0].keys() - rules.keys() - RULED_ELSEWHERE
        assert not without_a_rule, f"no rule says what becomes of {without_a_rule} on another mesh"
        combined: dict[str, Any] = {}
        for name, rule in rules.items():
            values = [values[name] for values in old]
            combined[name] = self._combined(rule, values) if isinstance(rule, dict) else rule(self, values)
        return combined

    @property
    def recipients(self) -> tuple[int, int]:
        """Return (number of ranks that share the values of this rank's sources, index of this rank among them)."""
        if not self.replicas_changed:
            return self.shards, self.shard
        return self.replicas * self.shards, self.replica * self.shards + self.shard


Rule = Callable[[MeshChange, list], Any]
"""Function from the values of a rank's source ranks to the rank's own value."""


def first(change: MeshChange, values: list) -> Any:
    """Return the value that all ranks share."""
    return values[0]


def mean(change: MeshChange, values: list) -> float:
    """Return the mean, which log lines show. Equal values are returned unchanged."""
    return values[0] if all(value == values[0] for value in values) else sum(values) / len(values)


def largest(change: MeshChange, values: list) -> float:
    """Return the largest value, which log lines show."""
    return max(values)


def split_evenly(change: MeshChange, values: list) -> float:
    """Return this rank's equal part of the sum, which log lines show. Integers stay integers."""
    count, index = change.recipients
    total = sum(values)
    return total // count + (index < total % count) if isinstance(total, int) else total / count


def mean_over_replicas(change: MeshChange, values: list) -> float:
    """Return a replica's equal part of the sum over replicas, which log lines show. Every rank of a replica
    holds its replica's count."""
    return sum(values) / change.old_shards / (change.replicas if change.replicas_changed else 1)


def sum_over_shards(change: MeshChange, values: list) -> float:
    """Return a shard's equal part of the mean over replicas, which log lines show. Each rank holds its shard's
    part of its replica's number."""
    return sum(values) / len(change.source_replicas) / change.shards


TRAFFIC = {"bytes": split_evenly, "seconds": mean}
RULES: dict[str, Any] = {
    "gradients": mean,
    "skipped": mean_over_replicas,
    "predicted_tokens": split_evenly,
    "interval": {
        "loss": split_evenly,
        "grad_norm": mean,
        "steps": mean,
        "gradients": mean,
        "predicted_tokens": split_evenly,
        "step_seconds": largest,
        "data_seconds": largest,
    },
    "train_seconds": first,
    "gradient_wait_seconds": mean,
    "first_eval": first,
    "last_eval": first,
    "last_evaluated": first,
    "last_line": first,
    "traffic": TRAFFIC,
    "other_traffic": TRAFFIC,
    "method": {
        "report": {
            "count": first,
            "anomalies": first,
            "rollbacks": first,
            "late": mean_over_replicas,
            "seconds": mean,
            "exposed_seconds": mean,
            "wait_seconds": mean,
            "weights_max": first,
            "slowest_replica": first,
            "mean_squared": sum_over_shards,
            "spread_squared": sum_over_shards,
        }
    },
}
"""Rule of every value that a rank keeps, except those in `RULED_ELSEWHERE`."""
RULED_ELSEWHERE = {"step", "loader", "period", "schedule"}
"""Values handled by `MeshChange.progress`, the loader and the method."""
