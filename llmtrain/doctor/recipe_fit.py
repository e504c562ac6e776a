"""Checks of whether a recipe fits these ranks: its mesh, its memory, and its disk space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llmtrain.config import Recipe
from llmtrain.doctor.finding import Finding, ok, problem, warning
from llmtrain.doctor.machine import GIB, disk
from llmtrain.errors import ModelError, UserError
from llmtrain.plan.memory import Memory, ModelSize, estimate, size_of
from llmtrain.plan.mesh_plan import MEMORY_HEADROOM, plan_mesh
from llmtrain.plan.traffic import per_average, traffic
from llmtrain.recipe_check import check, check_group


@dataclass(frozen=True)
class Plan:
    """Mesh and model size of a recipe on the given ranks."""

    replicas: int
    shard: int
    size: ModelSize | None
    """None if the vocabulary size is unknown until the tokenizer is available."""


def fit(recipe: Recipe, nodes: Sequence[str], memory: Sequence[float]) -> tuple[list[Finding], Plan | None]:
    """Return findings and the plan, which is None if the recipe cannot run on these ranks.

    `nodes` lists the node name of each rank, `memory` the bytes that each rank may use.
    """
    on_gpu = torch.cuda.is_available()
    try:
        check(recipe, len(nodes))
        replicas, shard, reason = plan_mesh(recipe, nodes, memory, on_gpu)
        check_group(recipe, replicas)
    except UserError as error:
        return [problem(f"recipe: {error}", "")], None
    findings = [ok(f"mesh: {replicas} replicas x {shard} shards ({reason})")]
    if recipe.parallel.precision == "bf16" and on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        findings.append(problem("this GPU does not compute in bf16", "set parallel.precision=fp32"))
    try:
        size = size_of(recipe)
    except ModelError as error:
        findings.append(warning(f"memory and traffic are not estimated: {error}", ""))
        return [*findings, *_room(recipe, None)], Plan(replicas, shard, None)
    needed = estimate(recipe, size, replicas, shard)
    findings.append(_memory(needed.device_total + (0 if on_gpu else needed.host_total), min(memory)))
    sent = traffic(_with_replicas(recipe, replicas), size)
    findings.append(ok(f"traffic between replicas: {' · '.join(sent.splitlines())}"))
    return [*findings, *_room(recipe, _checkpoint_bytes(needed, len(nodes)))], Plan(replicas, shard, size)


def round_bytes(recipe: Recipe, size: ModelSize, replicas: int, shard: int) -> float:
    """Return the bytes that each rank sends over the replica axis in one synchronization (or synchronous step)."""
    rounded = not recipe.sync.period.averages_gradients or recipe.sync.wire.gradients
    return per_average(recipe, size, replicas, recipe.sync.wire.kind if rounded else "fp32") / shard


def _with_replicas(recipe: Recipe, replicas: int) -> Recipe:
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"replicas": replicas})})


def _memory(needed: float, there: float) -> Finding:
    what = f"memory: about {needed / GIB:.1f} GiB a rank, {there / GIB:.1f} GiB there"
    if needed <= MEMORY_HEADROOM * there:
        return ok(what)
    advice = "lower train.micro_batch, set parallel.activation_checkpointing or sync.offload, or use a larger parallel.shards"
    return warning(f"{what}: it may run out", advice)


def _checkpoint_bytes(memory: Memory, processes: int) -> int:
    """Return the size in bytes of a checkpoint: masters, optimizer state and anchors of all ranks."""
    return processes * (memory.weights + memory.optimizer + memory.anchors + memory.host)


def _room(recipe: Recipe, checkpoint: int | None) -> list[Finding]:
    # One more than `keep`, because the oldest is deleted only when the newest is complete.
    runs = None if checkpoint is None else (recipe.checkpoint.keep + 1) * checkpoint
    return [disk("run.out_dir", recipe.run.out_dir, runs), disk("data.cache_dir", recipe.data.cache_dir, None)]
