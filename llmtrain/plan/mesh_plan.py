"""The mesh of a run and a check that it fits in the available memory, before any data is read."""

from __future__ import annotations

from collections.abc import Sequence

from llmtrain.config import Recipe
from llmtrain.errors import ModelError, RecipeError
from llmtrain.plan.memory import Memory, ModelSize, estimate, size_of
from llmtrain.plan.mesh_choice import choose_mesh, given_shard

MEMORY_HEADROOM = 0.8
"""Share of a device's memory that an automatically chosen mesh may be estimated to need. The rest covers what the
estimate leaves out, and its error on GPUs, because it was compared with measurements on CPUs only."""
ASSUMED_VOCABULARY = 32_000
"""Vocabulary size assumed for a tokenizer that is not downloaded yet. Few tokenizers have fewer tokens, so a recipe
is hardly ever refused by mistake."""


def plan_mesh(recipe: Recipe, nodes: Sequence[str], memory: Sequence[float], on_gpu: bool) -> tuple[int, int, str]:
    """Return (replicas, shard, reason in a few words) for ranks on these `nodes`.

    `memory` is the bytes that each rank may use. Raises RecipeError for a mesh that `choose_mesh` refuses, or that
    needs more memory than the smallest rank has. A mesh that the recipe gives is refused only if weights, gradients,
    optimizer and anchors alone are too large.
    """
    size, least = _size(recipe), min(memory)

    def needs(shard: int) -> Memory:
        return estimate(recipe, size, len(nodes) // shard, shard)

    replicas, shard, reason = choose_mesh(
        recipe.parallel, nodes, on_gpu, lambda shard: _all_of(needs(shard), on_gpu) <= MEMORY_HEADROOM * least
    )
    ours = given_shard(recipe.parallel, len(nodes), on_gpu) is None
    needed = _all_of(needs(shard), on_gpu) if ours else _state_of(needs(shard), on_gpu)
    if needed > least:
        raise RecipeError(_too_large(recipe, size, replicas, shard, needed, least, on_gpu, ours, len(set(nodes)) > 1))
    return replicas, shard, reason


def _size(recipe: Recipe) -> ModelSize:
    try:
        return size_of(recipe)
    except ModelError:  # the tokenizer is to be downloaded; anything else is raised once more
        return size_of(recipe, ASSUMED_VOCABULARY)


def _all_of(memory: Memory, on_gpu: bool) -> int:
    return memory.device_total + (0 if on_gpu else memory.host_total)


def _state_of(memory: Memory, on_gpu: bool) -> int:
    """Return the bytes of weights, gradients, optimizer and anchors. This is arithmetic, not an estimate."""
    state = memory.weights + memory.gradients + memory.optimizer + memory.anchors
    return state + (0 if on_gpu else memory.host_total)


def _too_large(
    recipe: Recipe,
    size: ModelSize,
    replicas: int,
    shard: int,
    needed: float,
    least: float,
    on_gpu: bool,
    ours: bool,
    several_nodes: bool,
) -> str:
    each = "on each GPU" if on_gpu else "for each process (there is no GPU)"
    there = "the smallest has" if on_gpu else "the machine has, for each,"
    what = "about" if ours else "for weights, gradients, optimizer and anchors alone"
    changes = ["more devices", "larger ones", "a smaller model"]
    if ours:
        if recipe.train.micro_batch > 1:
            changes.append(f"train.micro_batch below {recipe.train.micro_batch}")
        if not recipe.parallel.activation_checkpointing:
            changes.append("parallel.activation_checkpointing=true")
        if several_nodes and not recipe.parallel.shard_across_nodes:
            changes.append("parallel.shard_across_nodes=true")
        changes.append("parallel.replicas and parallel.shards, to try all the same")
    return (
        f"{recipe.run.name} has {size.parameters:,} parameters; as {replicas} replicas x {shard} shards it needs {what} "
        f"{needed / 2**30:.1f} GiB {each}, and {there} {least / 2**30:.1f} GiB; "
        f"give {', '.join(changes[:-1])} or {changes[-1]}"
    )
