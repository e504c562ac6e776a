"""Continuing on another mesh than the one that wrote a checkpoint: which of its ranks and replicas a rank starts from,
and by which rule. docs/resume.md has the rules as a table.

The same replicas with other shards go on as if nothing had happened: tensors are cut anew, and what ranks count is dealt
out anew within each replica. Other replicas all start alike, from the mean of the old ones; what replicas share stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llmtrain.data.unread import left_by
from llmtrain.parallel.mesh import Mesh
from llmtrain.sync.method import Method

SUMMED = ("error",)
"""Tensors of replicas whose sum over them counts, not their mean: rounding errors are added to messages that are weighted
already, so the new replicas take equal parts of what all old ones have left out."""


@dataclass(frozen=True)
class Reshape:
    """From `old_replicas` x `old_shards` ranks to the mesh of which this rank is one."""

    old_replicas: int
    old_shards: int
    replicas: int
    shards: int
    replica: int
    shard: int

    @classmethod
    def onto(cls, mesh: Mesh, written_by: Sequence[int]) -> Reshape:
        """`written_by` is (replicas, shards)."""
        return cls(*written_by, mesh.replicas, mesh.shard.size, mesh.replica.rank, mesh.shard.rank)

    @property
    def is_none(self) -> bool:
        """The mesh is the one that wrote the checkpoint."""
        return not self.mixes and self.old_shards == self.shards

    @property
    def mixes(self) -> bool:
        """There are other replicas now than those that wrote the checkpoint."""
        return self.old_replicas != self.replicas

    @property
    def sources(self) -> list[int]:
        """The old replicas that this rank's replica starts from the mean of."""
        return list(range(self.old_replicas)) if self.mixes else [self.replica]

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
        if self.is_none:
            return ""
        written = f", written by {self.old_replicas} replicas x {self.old_shards} shards"
        if not self.mixes:
            return f"{written}: the same replicas on {self.shards} shards"
        start = f"{self.replicas} replicas start" if self.replicas > 1 else "1 replica starts"
        return f"{written}: {start} from their mean" if self.old_replicas > 1 else f"{written}: {start} from it"

    def progress(self, ranks: Sequence[dict[str, Any]], step: int, global_batch: int, method: Method) -> dict[str, Any]:
        """This rank's plain values, from those of all old ranks. `step` is the whole run's."""
        if self.is_none:
            return ranks[self.replica * self.shards + self.shard]
        old = [ranks[replica * self.old_shards + s] for replica in self.sources for s in range(self.old_shards)]
        progress = self._combined(RULES, old)
        of_replicas = old[:: self.old_shards]
        methods = [rank["method"] for rank in of_replicas]
        if self.mixes:
            progress |= {"step": step, "loader": left_by([rank["loader"] for rank in of_replicas], global_batch)}
            progress["method"] |= method.reshaped(methods)
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
    def heirs(self) -> tuple[int, int]:
        """(How many ranks share what this rank's sources had, which of them this is)."""
        if not self.mixes:
            return self.shards, self.shard
        return self.replicas * self.shards, self.replica * self.shards + self.shard


Rule = Callable[[Reshape, list], Any]
"""A rank's value, from those of its sources' ranks."""


def first(reshape: Reshape, values: list) -> Any:
    """All ranks know the same."""
    return values[0]


def mean(reshape: Reshape, values: list) -> float:
    """Each rank says it of its replica, or of itself; lines show the mean."""
    return values[0] if all(value == values[0] for value in values) else sum(values) / len(values)


def largest(reshape: Reshape, values: list) -> float:
    """Lines show the largest."""
    return max(values)


def shared_out(reshape: Reshape, values: list) -> float:
    """Each rank counts its own; lines show the sum. Whole numbers stay whole."""
    heirs, place = reshape.heirs
    total = sum(values)
    return total // heirs + (place < total % heirs) if isinstance(total, int) else total / heirs


def of_replicas(reshape: Reshape, values: list) -> float:
    """Every rank of a replica has its replica's count; lines show the sum over replicas."""
    return sum(values) / reshape.old_shards / (reshape.replicas if reshape.mixes else 1)


def of_shards(reshape: Reshape, values: list) -> float:
    """Each rank has its shard's part of its replica's number; lines show the mean over replicas."""
    return sum(values) / len(reshape.sources) / reshape.shards


TRAFFIC = {"bytes": shared_out, "seconds": mean}
RULES: dict[str, Any] = {
    "gradients": mean,
    "skipped": of_replicas,
    "predicted_tokens": shared_out,
    "interval": {
        "loss": shared_out,
        "grad_norm": mean,
        "steps": mean,
        "gradients": mean,
        "predicted_tokens": shared_out,
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
            "late": of_replicas,
            "seconds": mean,
            "exposed_seconds": mean,
            "wait_seconds": mean,
            "weights_max": first,
            "slowest_replica": first,
            "mean_squared": of_shards,
            "spread_squared": of_shards,
        }
    },
}
"""The rule of every value that a rank keeps, but for these:"""
RULED_ELSEWHERE = {"step", "loader", "period", "schedule"}
"""By `Reshape.progress`, the loader and the method."""
