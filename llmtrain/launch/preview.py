"""Output lines of `recipe check`: warnings, the mesh, model and memory of a start, and finally that the recipe is fine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from llmtrain.config import Recipe
from llmtrain.data.documents import document_samples
from llmtrain.launch.preflight import Preflight
from llmtrain.plan.memory import estimate
from llmtrain.plan.mesh_plan import given_shards, size_or_assumed
from llmtrain.plan.model_size import size_of
from llmtrain.quantities import GIB, counted, mesh_size
from llmtrain.train.loggers import mesh_line, model_line


def preview(path: Path, recipe: Recipe, preflight: Preflight) -> list[str]:
    """Return the output lines for a start on this machine, given the outcome of its checks."""
    warnings = _marked(preflight.warnings)
    if preflight.completed is not None:
        return [*warnings, f"{path}: fine, but {preflight.completed}"]
    prepared = preflight.prepared
    size = size_or_assumed(recipe) if prepared is None else size_of(recipe, prepared.vocab_size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    needed = estimate(recipe, size, preflight.replicas, preflight.shards).total(on_gpu=device == "cuda")
    each = "the process" if preflight.processes == 1 else f"each of {preflight.processes} processes"
    lines = [
        *warnings,
        mesh_line(preflight.replicas, preflight.shards, device, preflight.reason),
        model_line(recipe, size.parameters, len(size.block_parameters), _sequences(recipe, preflight)),
    ]
    if prepared is None:
        lines.append(
            "note: the text is not tokenized yet; the start or llmtrain prepare will check whether it is long enough"
        )
    if preflight.weights is not None:
        lines.append(preflight.weights.describe())
    lines.append(f"memory: about {needed / GIB:.2f} GiB for {each}, which may use {preflight.memory / GIB:.1f} GiB")
    return [*lines, f"{path}: fine on this machine"]


def preview_elsewhere(path: Path, recipe: Recipe, processes: int, warnings: Sequence[str]) -> list[str]:
    """Return the output lines for a start of this number of processes on unknown machines with GPUs, given its warnings. If the mesh
    depends on the machines, the line about memory has the meshes with the fewest and with the most shards."""
    train, size, ranks = recipe.train, size_or_assumed(recipe), processes * recipe.parallel.ranks_per_process
    given = (1, "one process") if ranks == 1 else given_shards(recipe.parallel, ranks, on_gpu=True)
    shapes = (1, ranks) if given is None else (given[0],)
    needs = [
        f"{estimate(recipe, size, ranks // shards, shards).total(on_gpu=True) / GIB:.2f} GiB"
        f"{f' as {mesh_size(ranks // shards, shards)}' if given is None else ''}"
        for shards in shapes
    ]
    if given is None:
        mesh = f"mesh: {ranks} processes, whose nodes and GPUs decide it (give parallel.replicas or parallel.shards to fix it)"
    else:
        mesh = mesh_line(ranks // given[0], given[0], "cuda", given[1])
    length = f"{counted(train.total_steps, 'step', ',')} of {recipe.data.at_most}{train.tokens_per_step:,} tokens"
    return [*_marked(warnings), mesh, f"memory: about {' or '.join(needs)} on each GPU", f"{path}: fine ({length})"]


def _marked(warnings: Sequence[str]) -> list[str]:
    return [f"warning: {line}" for line in warnings]


def _sequences(recipe: Recipe, preflight: Preflight) -> int | None:
    if preflight.prepared is None:
        return None
    length = recipe.train.sequence_length
    if recipe.data.packing == "none":
        return len(document_samples(preflight.prepared, "train", length, write=False))
    return sum(max(len(text.tokens("train")) - 1, 0) // length for text in preflight.texts.values())
