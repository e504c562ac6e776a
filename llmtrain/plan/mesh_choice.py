"""Which mesh a run gets when the recipe leaves it to us, and which one it may not have."""

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
    """(replicas, shard, the reason in a few words) for ranks on these `nodes`, one name a rank.

    What the recipe says wins; without GPUs that is also `parallel.on_cpu`, if there are as many ranks. Otherwise a node
    is a shard group, since the network inside it is the fast one; a single node is split into as many replicas as fit in
    memory: `fits(shard)` says whether a replica sharded over so many ranks does. `check_mesh` has made sure that given
    numbers divide the world.

    Raises RecipeError if a replica would span nodes and `parallel.shard_across_nodes` does not allow it.
    """
    shard, reason = given_shard(parallel, len(nodes), on_gpu) or _by_nodes(parallel, nodes, fits)
    if not parallel.shard_across_nodes:
        _check_nodes(shard, nodes)
    return len(nodes) // shard, shard, reason


def given_shard(parallel: ParallelSection, world: int, on_gpu: bool) -> tuple[int, str] | None:
    """(shard, the reason) of the mesh that the recipe gives for `world` ranks, None where it leaves it to us."""
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
    """Raise RecipeError unless each replica, `shard` ranks in a row, is on one node."""
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
    """How many ranks there are on how many nodes: `3 x 8 and 1 x 4`."""
    return " and ".join(f"{many} x {size}" for size, many in Counter(Counter(nodes).values()).items())


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
