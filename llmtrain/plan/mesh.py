"""Which mesh a run gets when the recipe leaves it to us."""

from __future__ import annotations

from collections.abc import Callable

from llmtrain.config import ParallelSection


def choose_mesh(
    parallel: ParallelSection, world: int, local_world: int, fits: Callable[[int], bool]
) -> tuple[int, int, str]:
    """(replicas, shard, the reason in a few words) for `world` processes, `local_world` of them on each node.

    What the recipe says wins. Otherwise a node is a shard group, since the network inside it is the fast one; a
    single node is split into as many replicas as fit in memory: `fits(shard)` says whether a replica sharded over so
    many ranks does. `check_mesh` has made sure that given numbers divide the world.
    """
    if parallel.replicas != "auto" and parallel.shard != "auto":
        return parallel.replicas, parallel.shard, "as the recipe says"
    if parallel.shard != "auto":
        return world // parallel.shard, parallel.shard, f"{world} processes, parallel.shard={parallel.shard}"
    if parallel.replicas != "auto":
        return (
            parallel.replicas,
            world // parallel.replicas,
            f"{world} processes, parallel.replicas={parallel.replicas}",
        )
    if world > local_world:
        return (
            world // local_world,
            local_world,
            f"{world // local_world} nodes of {local_world}: a node is a shard group",
        )
    for shard in (size for size in range(1, world + 1) if world % size == 0):
        if fits(shard):
            reason = "one process" if world == 1 else f"one node of {world}: as many replicas as fit in memory"
            return world // shard, shard, reason
    return 1, world, f"one node of {world}: one replica over all of it, and even so the estimate exceeds its memory"
