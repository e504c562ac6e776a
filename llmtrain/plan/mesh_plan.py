"""Choice of a run's mesh, and a check that it fits in memory, before any data is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby

from llmtrain.config import ParallelSection, Recipe
from llmtrain.errors import ModelError, RecipeError
from llmtrain.plan.memory import Memory, copies_background_checkpoints, estimate, reshards
from llmtrain.plan.model_size import ModelSize, size_of
from llmtrain.quantities import GIB, counted, mesh_size
from llmtrain.recipe_messages import one_of


def choose_mesh(
    parallel: ParallelSection, nodes: Sequence[str], on_gpu: bool, fits: Callable[[int], bool]
) -> tuple[int, int, str]:
    """Return (replicas, shards, reason in a few words) for ranks on these `nodes`, one node name per rank.

    Numbers given in the recipe take precedence. Without GPUs, so does `parallel.on_cpu` if its product is the number of
    ranks. Otherwise a node is a shard group, because the network inside a node is the fast one. With
    `parallel.shard_across_nodes`, a shard group spans as many nodes as a replica needs to fit in memory. A single node
    is split into as many replicas as fit in memory. `fits(shards)` returns whether a replica sharded over `shards` ranks
    fits. `check_mesh` has already verified that given numbers divide the number of ranks.

    Raises RecipeError if a replica would span nodes without `parallel.shard_across_nodes`, if a replica would have a
    part of one node and also other nodes although `parallel.shards` is not given, or if the choice is open and the
    nodes have different numbers of ranks.
    """
    shards, reason = given_shards(parallel, len(nodes), on_gpu) or _by_nodes(parallel, nodes, fits)
    if not parallel.shard_across_nodes:
        _check_nodes(shards, nodes)
    elif parallel.shards == "auto":
        _check_parts(shards, nodes)
    return len(nodes) // shards, shards, reason


def given_shards(parallel: ParallelSection, world: int, on_gpu: bool) -> tuple[int, str] | None:
    """Return (shards, reason) if the recipe determines the mesh of `world` ranks; None if the recipe leaves the mesh open."""
    if parallel.in_process:
        return 1, "in one process, in turns"
    replicas, shards, on_cpu = parallel.replicas, parallel.shards, parallel.given_on_cpu
    if "auto" not in (replicas, shards):
        return shards, "as the recipe says"
    if not on_gpu and len(on_cpu) == 2 and math.prod(on_cpu) == world:
        return on_cpu[1], "no GPU: parallel.on_cpu"
    if shards != "auto":
        return shards, f"{counted(world, 'process')}, parallel.shards={shards}"
    if replicas != "auto":
        return world // replicas, f"{counted(world, 'process')}, parallel.replicas={replicas}"
    return None


def _by_nodes(parallel: ParallelSection, nodes: Sequence[str], fits: Callable[[int], bool]) -> tuple[int, str]:
    world = len(nodes)
    sizes = set(Counter(nodes).values())
    if world == 1:
        return 1, "one process"
    if len(sizes) > 1:
        raise RecipeError(
            f"there are {_listed(nodes)} ranks (nodes x ranks), so a node can't be a replica; start the same number on each, or give "
            f"parallel.shards, at most {math.gcd(*sizes)}"
        )
    per_node = sizes.pop()
    count = world // per_node
    if count == 1:
        for shards in _divisors(world):
            if fits(shards):
                return shards, f"one node of {world}: as many replicas as fit in memory"
        return world, f"one node of {world}: one replica over all of it, a tight fit in memory"
    if parallel.shard_across_nodes:
        for spanned in _divisors(count):
            if fits(spanned * per_node):
                what = "a node is a shard group"
                if spanned > 1:
                    what = f"{spanned} nodes are a shard group, to fit in memory"
                return spanned * per_node, f"{count} nodes of {per_node}: {what}"
        return world, f"{count} nodes of {per_node}: one replica over all of them, a tight fit in memory"
    return per_node, f"{count} nodes of {per_node}: a node is a shard group"


def _check_nodes(shards: int, nodes: Sequence[str]) -> None:
    """Raise RecipeError unless each replica, `shards` consecutive ranks, is on one node."""
    for first in range(0, len(nodes), shards):
        spanned = len(set(nodes[first : first + shards]))
        if spanned == 1:
            continue
        node_by_node = len(list(groupby(nodes))) == len(set(nodes))
        change = (
            f"give parallel.shards={math.gcd(*Counter(nodes).values())} or a divisor of it"
            if node_by_node
            else "number the ranks node by node (srun --distribution=block)"
        )
        raise RecipeError(
            f"parallel.shards is {shards}, but there are {_listed(nodes)} ranks (nodes x ranks): the replica of ranks {first} to "
            f"{first + shards - 1} would be sharded over {spanned} nodes and the slow network between them; {change}, or "
            f"parallel.shard_across_nodes=true to allow it"
        )


def _check_parts(shards: int, nodes: Sequence[str]) -> None:
    """Raise RecipeError if a replica, `shards` consecutive ranks, would have a part of one node and also other nodes.
    The number of shards was not given, and the nodes may be at different sites."""
    for first in range(0, len(nodes), shards):
        within, others = nodes[first : first + shards], [*nodes[:first], *nodes[first + shards :]]
        if len(set(within)) > 1 and (shared := set(within) & set(others)):
            raise RecipeError(
                f"parallel.replicas is {len(nodes) // shards}, but there are {_listed(nodes)} ranks (nodes x ranks): {min(shared)} would "
                f"belong to two replicas, and one of them would also have other nodes; give another number of replicas, or, if a fast "
                f"network joins all nodes, parallel.shards={shards}, too"
            )


def _listed(nodes: Sequence[str]) -> str:
    """Return the numbers of nodes and ranks per node as text: `3 x 8 and 1 x 4`."""
    return " and ".join(f"{many} x {size}" for size, many in Counter(Counter(nodes).values()).items())


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


MEMORY_HEADROOM = 0.8
"""Maximum fraction of a device's memory that an automatically chosen mesh may take by the estimate. The rest covers the
parts that the estimate leaves out, and its error on GPUs, which is unknown because the estimate was compared with
measurements on CPUs only."""
ASSUMED_VOCABULARY = 32_000
"""Vocabulary size assumed for a tokenizer that is not downloaded yet. Few tokenizers are smaller, so a recipe is hardly ever
refused because its memory is overestimated."""


def plan_mesh(recipe: Recipe, nodes: Sequence[str], memory: Sequence[float], on_gpu: bool) -> tuple[int, int, str]:
    """Return (replicas, shards, reason in a few words) for processes on these `nodes`.

    `memory` lists the bytes that each process may use for all of its ranks. Raises RecipeError for a mesh that `choose_mesh`
    refuses, or that needs more memory than the process with the least memory has. A mesh given in the recipe is refused only
    if weights, gradients, optimizer and anchors alone are too large.
    """
    size, least = size_or_assumed(recipe), min(memory)
    nodes = [node for node in nodes for _ in range(recipe.parallel.ranks_per_process)]

    def needs(shards: int) -> Memory:
        return estimate(recipe, size, len(nodes) // shards, shards)

    replicas, shards, reason = choose_mesh(
        recipe.parallel, nodes, on_gpu, lambda shards: needs(shards).total(on_gpu) <= MEMORY_HEADROOM * least
    )
    ours = given_shards(recipe.parallel, len(nodes), on_gpu) is None
    needed = needs(shards)
    total = needed.total(on_gpu) if ours else _state_of(needed, on_gpu)
    if total > least:
        what = "about" if ours else "for weights, gradients, optimizer and anchors alone"
        each = "on each GPU" if on_gpu else "for each process (there is no GPU)"
        there = "the smallest has" if on_gpu else "the machine has, for each,"
        if recipe.parallel.in_process:
            each, there = "for all replicas in one process", "the process has"
        raise RecipeError(
            f"{recipe.run.name} has {size.parameters:,} parameters; as {mesh_size(replicas, shards)} it needs "
            f"{what} {total / GIB:.1f} GiB {each}, and {there} {least / GIB:.1f} GiB; "
            f"give {one_of(_remedies(recipe, ours, len(set(nodes)) > 1, on_gpu))}"
        )
    return replicas, shards, reason


def with_reshard_after_forward_decided(recipe: Recipe, vocab_size: int, replicas: int, shards: int) -> ParallelSection:
    """Return the recipe's `parallel` section. If `reshard_after_forward` is `auto` and has an effect, replace it by the
    decision, true or false."""
    parallel = recipe.parallel
    if parallel.engine != "fsdp2" or shards == 1 or parallel.reshard_after_forward != "auto":
        return parallel
    decided = reshards(recipe, size_of(recipe, vocab_size), replicas, shards)
    return parallel.model_copy(update={"reshard_after_forward": decided})


def size_or_assumed(recipe: Recipe) -> ModelSize:
    """Return the size of the recipe's model, with ASSUMED_VOCABULARY if the tokenizer is not downloaded yet."""
    try:
        return size_of(recipe)
    except ModelError:  # the tokenizer is not downloaded yet; other causes raise again below
        return size_of(recipe, ASSUMED_VOCABULARY)


def _state_of(memory: Memory, on_gpu: bool) -> int:
    """Return the bytes of weights, gradients, optimizer and anchors. They are exact, unlike the other parts of the estimate."""
    state = memory.weights + memory.gradients + memory.optimizer + memory.anchors
    return state + (0 if on_gpu else memory.host)


def _remedies(recipe: Recipe, ours: bool, several_nodes: bool, on_gpu: bool) -> list[str]:
    """Return changes that could make the run fit in memory. They include recipe keys other than `parallel.in_process`
    only if the mesh was chosen here (`ours`) instead of given by the recipe."""
    changes = ["more devices", "larger ones", "a smaller model"]
    if recipe.parallel.in_process:
        changes = ["fewer replicas", "parallel.in_process=false with more devices", "a smaller model"]
    if ours:
        if recipe.train.micro_batch > 1:
            changes.append(f"train.micro_batch below {recipe.train.micro_batch}")
        if not recipe.parallel.activation_checkpointing:
            changes.append("parallel.activation_checkpointing=true")
        if copies_background_checkpoints(recipe) and not on_gpu:
            changes.append("checkpoint.background=false")
        if several_nodes and not recipe.parallel.shard_across_nodes:
            changes.append("parallel.shard_across_nodes=true")
        changes.append("parallel.replicas and parallel.shards, to try it anyway")
    return changes
