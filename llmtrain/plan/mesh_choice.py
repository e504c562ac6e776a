"""Choice of the mesh where the recipe leaves it open, and refusal of meshes that the nodes do not allow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby

from llmtrain.config import ParallelSection
from llmtrain.errors import RecipeError


def choose_mesh(
    parallel: ParallelSection, nodes: Sequence[str], on_gpu: bool, fits: Callable[[int], bool]
) -> tuple[int, int, str]:
    """Return (replicas, shard, reason in a few words) for ranks on these `nodes`, one node name per rank.

    The recipe's numbers win. Without GPUs, `parallel.on_cpu` counts too, if its product is the number of ranks.
    Otherwise a node is a shard group, because the network inside a node is the fast one. With
    `parallel.shard_across_nodes`, a shard group is as many nodes as a replica needs to fit in memory. A single node
    is split into as many replicas as fit in memory. `fits(shard)` tells whether a replica sharded over `shard` ranks
    fits. `check_mesh` has made sure that given numbers divide the number of ranks.

    Raises RecipeError if a replica would span nodes without `parallel.shard_across_nodes`, or if the choice is open
    and the nodes have different numbers of ranks.
    """
    shard, reason = given_shard(parallel, len(nodes), on_gpu) or _by_nodes(parallel, nodes, fits)
    if not parallel.shard_across_nodes:
        _check_nodes(shard, nodes)
    return len(nodes) // shard, shard, reason


def given_shard(parallel: ParallelSection, world: int, on_gpu: bool) -> tuple[int, str] | None:
    """Return (shard, reason) of the mesh that the recipe gives for `world` ranks, or None if it leaves the choice
    open."""
    replicas, shard, on_cpu = parallel.replicas, parallel.shards, parallel.given_on_cpu
    if "auto" not in (replicas, shard):
        return shard, "as the recipe says"
    if not on_gpu and len(on_cpu) == 2 and math.prod(on_cpu) == world:
        return on_cpu[1], "no GPU: parallel.on_cpu"
    if shard != "auto":
        return shard, f"{world} processes, parallel.shards={shard}"
    if replicas != "auto":
        return world // replicas, f"{world} processes, parallel.replicas={replicas}"
    return None


def _by_nodes(parallel: ParallelSection, nodes: Sequence[str], fits: Callable[[int], bool]) -> tuple[int, str]:
    world, sizes = len(nodes), set(Counter(nodes).values())
    if world == 1:
        return 1, "one process"
    if len(sizes) > 1:
        raise RecipeError(
            f"there are {_listed(nodes)} ranks (nodes x ranks), so a node can't be a replica; start equally many on each, or give "
            f"parallel.shards, at most {math.gcd(*sizes)}"
        )
    per_node = sizes.pop()
    count = world // per_node
    if count == 1:
        for shard in _divisors(world):
            if fits(shard):
                return shard, f"one node of {world}: as many replicas as fit in memory"
        return world, f"one node of {world}: one replica over all of it, a tight fit in memory"
    if parallel.shard_across_nodes:
        for together in _divisors(count):
            if fits(together * per_node):
                what = (
                    "a node is a shard group"
                    if together == 1
                    else f"{together} nodes are a shard group, to fit in memory"
                )
                return together * per_node, f"{count} nodes of {per_node}: {what}"
    return per_node, f"{count} nodes of {per_node}: a node is a shard group"


def _check_nodes(shard: int, nodes: Sequence[str]) -> None:
    """Raise RecipeError unless each replica, `shard` consecutive ranks, is on one node."""
    for first in range(0, len(nodes), shard):
        spanned = len(set(nodes[first : first + shard]))
        if spanned == 1:
            continue
        node_by_node = len(list(groupby(nodes))) == len(set(nodes))
        change = (
            f"give parallel.shards={math.gcd(*Counter(nodes).values())} or a divisor of it"
            if node_by_node
            else "number the ranks node by node (srun --distribution=block)"
        )
        raise RecipeError(
            f"parallel.shards is {shard}, but there are {_listed(nodes)} ranks (nodes x ranks): the replica of ranks {first} to "
            f"{first + shard - 1} would be sharded over {spanned} nodes and the slow network between them; {change}, or "
            f"parallel.shard_across_nodes=true to allow it"
        )


def _listed(nodes: Sequence[str]) -> str:
    """Return the numbers of nodes and ranks per node as text: `3 x 8 and 1 x 4`."""
    return " and ".join(f"{many} x {size}" for size, many in Counter(Counter(nodes).values()).items())


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
