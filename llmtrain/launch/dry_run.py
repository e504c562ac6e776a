"""Dry run: the checks of a start and the first lines that it would print. It starts no process, writes
no file and allocates no weights."""

from __future__ import annotations

import torch

from llmtrain.config import Recipe
from llmtrain.data.documents import document_samples
from llmtrain.launch.nodes import Nodes
from llmtrain.launch.preflight import Preflight, check_here, notes
from llmtrain.plan.memory import estimate
from llmtrain.plan.mesh_plan import size_or_assumed
from llmtrain.plan.model_size import size_of
from llmtrain.quantities import GIB
from llmtrain.train.loggers import mesh_line, model_line


def dry_run(recipe: Recipe, nodes: Nodes | None = None, per_node: int | None = None) -> list[str]:
    """Return the first lines that a start on these nodes, with `per_node` processes on each, would print. By default, the
    processes are those that `launch` would start. Raises UserError as the start would."""
    preflight = check_here(recipe, nodes, per_node)
    if preflight.completed is not None:
        return [*notes(preflight), preflight.completed]
    prepared = preflight.prepared
    size = size_or_assumed(recipe) if prepared is None else size_of(recipe, prepared.vocab_size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    needed = estimate(recipe, size, preflight.replicas, preflight.shards)
    needed = needed.total(on_gpu=device == "cuda")
    each = "the process" if preflight.processes == 1 else f"each of {preflight.processes} processes"
    return [
        *notes(preflight),
        mesh_line(preflight.replicas, preflight.shards, device, preflight.reason),
        model_line(recipe, size.parameters, len(size.block_parameters), _sequences(recipe, preflight)),
        *([] if preflight.weights is None else [preflight.weights.describe()]),
        f"memory: about {needed / GIB:.2f} GiB for {each}, which may use {preflight.memory / GIB:.1f} GiB",
        "dry run: nothing was started or written",
    ]


def _sequences(recipe: Recipe, preflight: Preflight) -> int | None:
    if preflight.prepared is None:
        return None
    length = recipe.train.sequence_length
    if recipe.data.packing == "none":
        return len(document_samples(preflight.prepared, "train", length, write=False))
    return sum(max(len(text.tokens("train")) - 1, 0) // length for text in preflight.texts.values())
