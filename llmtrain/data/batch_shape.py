"""Sizes of batches, and the part of them that each replica and rank reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import Any

from llmtrain.config import Recipe


def batch_unit(micro_batch: int, ranks: int, shares: Sequence[int] = ()) -> int:
    """Return the smallest global batch that `ranks` ranks can read in complete micro-batches; all larger ones are its
    multiples. `shares`, if given, has one entry per replica, and each replica reads its share of the batch."""
    if not shares:
        return micro_batch * ranks
    divisor = micro_batch * (ranks // len(shares)) * sum(shares)
    return lcm(*(divisor // gcd(divisor, share) for share in shares))


def relative_parts(shares: Sequence[int], replicas: int) -> list[float]:
    """Return the sequences that each replica reads per step, divided by their mean. Without `shares`, all are 1."""
    return [share * replicas / sum(shares) for share in shares] if shares else [1.0] * replicas


@dataclass(frozen=True)
class BatchShape:
    """Sizes of the batches that replicas share, and one rank's part of them."""

    sequence_length: int
    global_batch: int
    """Sequences that all replicas read per step."""
    micro_batch: int
    """Sequences per micro-batch of a rank."""
    seed: int
    """Seed of the order of samples."""
    replica: int = 0
    replicas: int = 1
    shard_rank: int = 0
    shards: int = 1
    """Number of ranks that share a replica's part of a batch."""
    shares: tuple[int, ...] = ()
    """Share of each replica, relative to the others; empty: equal shares."""

    def __post_init__(self) -> None:
        assert len(self.shares) in (0, self.replicas), self
        assert self.global_batch % batch_unit(self.micro_batch, self.replicas * self.shards, self.shares) == 0, self
        assert 0 <= self.replica < self.replicas and 0 <= self.shard_rank < self.shards, self

    @classmethod
    def of(
        cls, recipe: Recipe, *, replica: int = 0, replicas: int = 1, shard_rank: int = 0, shards: int = 1
    ) -> BatchShape:
        """Return the shape that a recipe gives to this rank."""
        train = recipe.train
        return cls(
            sequence_length=train.sequence_length,
            global_batch=train.global_batch,
            micro_batch=train.micro_batch,
            seed=recipe.run.seed,
            replica=replica,
            replicas=replicas,
            shard_rank=shard_rank,
            shards=shards,
            shares=train.batch_shares,
        )

    @property
    def part(self) -> range:
        """Return the indices in a global batch of the sequences that the replica's ranks read."""
        shares = self.shares or (1,) * self.replicas
        before, after = sum(shares[: self.replica]), sum(shares[: self.replica + 1])
        return range(self.global_batch * before // sum(shares), self.global_batch * after // sum(shares))

    @property
    def relative_part(self) -> float:
        """Return the number of sequences that the replica reads, divided by the mean over all replicas."""
        return relative_parts(self.shares, self.replicas)[self.replica]

    @property
    def per_rank(self) -> int:
        """Return the number of sequences of a global batch that each rank of the replica reads."""
        return len(self.part) // self.shards

    @property
    def first(self) -> int:
        """Return the index in a global batch of the first sequence that this rank reads."""
        return self.part.start + self.shard_rank * self.per_rank

    def state_dict(self) -> dict[str, Any]:
        """Return the replica's part of a global batch as a checkpoint stores it; empty without `shares`."""
        return {"part": [self.part.start, self.part.stop, self.global_batch]} if self.shares else {}

    def has_parts_of(self, states: Sequence[dict[str, Any]]) -> bool:
        """Return whether the replicas with the given `state_dict`s have the same parts as the replicas of this shape."""
        mine = [replace(self, replica=number).state_dict() for number in range(self.replicas)]
        return [state.get("part") for state in states] == [state.get("part") for state in mine]
