"""Groups of ranks for background threads, over gloo and CPU tensors and independent of the mesh's axes."""

from __future__ import annotations

from collections.abc import Sequence

from llmtrain.parallel.comms import Comms
from llmtrain.parallel.network import using_interface


def make_replica_groups(
    replica: Comms, shard: Comms, partition: Sequence[Sequence[int]], timeout_seconds: float
) -> Comms:
    """Create groups of replicas, and return this rank's, along its shard. A collective of all ranks.

    `partition` lists disjoint groups of replica numbers that together cover all replicas.
    """
    lists = [[r * shard.size + s for r in group] for s in range(shard.size) for group in partition]
    with using_interface(replica.interface):
        return replica.among(lists, replica.rank * shard.size + shard.rank, "group", timeout_seconds)


def shard_group(replica: Comms, shard: Comms, timeout_seconds: float) -> Comms:
    """Create a second group of each replica's ranks, on the CPU, and return this rank's. A collective of all ranks."""
    lists = [[r * shard.size + s for s in range(shard.size)] for r in range(replica.size)]
    with using_interface(shard.interface):
        return shard.among(lists, replica.rank * shard.size + shard.rank, "shard", timeout_seconds)
