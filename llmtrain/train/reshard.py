"""Continuing on another mesh than the one that wrote a checkpoint: which of its ranks and replicas a rank starts from,
and by which rule. docs/resume.md has the rules as a table.

The same replicas with other shards go on as if nothing had happened: tensors are cut anew, and what ranks count is dealt
out anew within each replica. Other replicas all start alike, from the mean of the old ones; what replicas share stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llmtrain.data.cursor import merge_cursors
from llmtrain.parallel.mesh import Mesh
from llmtrain.sync.method import Method

SUMMED = ("error",)
"""Tensors of replicas whose sum over them counts, not their mean: rounding errors are added to messages that are weighted
already, so the new replicas take equal parts of what all old ones have left out."""


@dataclass(frozen=True)
class MeshChange:
    """From `old_replicas` x `old_shards` ranks to the mesh of which this rank is one."""

    old_replicas: int
    old_shards: int
    replicas: int
    shards: int
    replica: int
    shard: int

    @classmethod
    def onto(cls, mesh: Mesh, written_by: Sequence[int]) -> MeshChange:
        """`written_by` is (replicas, shards)."""
        return cls(*written_by, mesh.replicas, mesh.shard.size, mesh.replica.rank, mesh.shard.rank)

    @property
    def is_identity(self) -> bool:
        """The mesh is the one that wrote the checkpoint."""
        return not self.replicas_changed and self.old_shards == self.shards

    @property
    def replicas_changed(self) -> bool:
        """There are other replicas now than those that wrote the checkpoint."""
        return self.old_replicas != self.replicas

    @property
    def source_replicas(self) -> list[int]:
        """The old replicas that this rank's replica starts from the mean of."""
        return list(range(self.old_replicas)) if self.replicas_changed else [self.replica]

    @property
    def same_rank(self) -> int | None:
        """The old rank at this rank's place in the mesh, if there was one."""
        there = self.replica < self.old_replicas and self.shard < self.old_shards
        return self.replica * self.old_shards + self.shard if there else None

    def factor(self, kind: str) -> float:
        """What the mean of the old replicas' tensors of this kind is multiplied by."""
        return self.old_replicas / self.replicas if kind in SUMMED else 1.0

    def describe(self) -> str:
        """In a few words for the console; empty where nothing changes."""
        if self.is_identity:
            return ""
        written = f", written by {self.old_replicas} replicas x {self.old_shards} shards"
        if not self.replicas_changed:
            return f"{written}: the same replicas on {self.shards} shards"
        start = f"{self.replicas} replicas start" if self.replicas > 1 else "1 replica starts"
        return f"{written}: {start} from their mean" if self.old_replicas > 1 else f"{written}: {start} from it"

    def progress(self, ranks: Sequence[dict[str, Any]], step: int, global_batch: int, method: Method) -> dict[str, Any]:
        """This rank's plain values, from those of all old ranks. `step` is the whole run's."""
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
        """(How many ranks share what this rank's sources had, which of them this is)."""
        if not self.replicas_changed:
            return self.shards, self.shard
        return self.replicas * self.shards, self.replica * self.shards + self.shard


Rule = Callable[[MeshChange, list], Any]
"""A rank's value, from those of its sources' ranks."""


def first(change: MeshChange, values: list) -> Any:
    """All ranks know the same."""
    return values[0]


def mean(change: MeshChange, values: list) -> float:
    """Each rank says it of its replica, or of itself; lines show the mean."""
    return values[0] if all(value == values[0] for value in values) else sum(values) / len(values)


def largest(change: MeshChange, values: list) -> float:
    """Lines show the largest."""
    return max(values)


def split_evenly(change: MeshChange, values: list) -> float:
    """Each rank counts its own; lines show the sum. Whole numbers stay whole."""
    count, index = change.recipients
    total = sum(values)
    return total // count + (index < total % count) if isinstance(total, int) else total / count


def mean_over_replicas(change: MeshChange, values: list) -> float:
    """Every rank of a replica has its replica's count; lines show the sum over replicas."""
    return sum(values) / change.old_shards / (change.replicas if change.replicas_changed else 1)


def sum_over_shards(change: MeshChange, values: list) -> float:
    """Each rank has its shard's part of its replica's number; lines show the mean over replicas."""
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
"""The rule of every value that a rank keeps, but for these:"""
RULED_ELSEWHERE = {"step", "loader", "period", "schedule"}
"""By `Reshape.progress`, the loader and the method."""
