"""Output lines of `recipe check`: warnings, the mesh, model and memory of a start, and finally that the recipe is fine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from llmtrain.config import Recipe
from llmtrain.data.documents import document_samples
from llmtrain.launch.preflight import Preflight
from llmtrain.plan.memory import estimate
from llmtrain.plan.mesh_plan import size_or_assumed
from llmtrain.plan.model_size import size_of
from llmtrain.quantities import GIB, counted
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


def preview_elsewhere(path: Path, recipe: Recipe, warnings: Sequence[str]) -> list[str]:
    """Return the output lines for a start on other machines, given its warnings."""
    train = recipe.train
    length = f"{counted(train.total_steps, 'step', ',')} of {recipe.data.at_most}{train.tokens_per_step:,} tokens"
    return [*_marked(warnings), f"{path}: fine ({length})"]


def _marked(warnings: Sequence[str]) -> list[str]:
    return [f"warning: {line}" for line in warnings]


def _sequences(recipe: Recipe, preflight: Preflight) -> int | None:
    if preflight.prepared is None:
        return None
    length = recipe.train.sequence_length
    if recipe.data.packing == "none":
        return len(document_samples(preflight.prepared, "train", length, write=False))
    return sum(max(len(text.tokens("train")) - 1, 0) // length for text in preflight.texts.values())
