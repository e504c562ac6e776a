"""Number of ranks that this node starts."""

from __future__ import annotations

import math

from llmtrain.config import ParallelSection
from llmtrain.launch.nodes import number


def processes_per_node(parallel: ParallelSection, nodes: int) -> int:
    """Return NPROC_PER_NODE, or `local_world_size` if it is unset or 0. Raises RecipeError if it is not a number."""
    return number("NPROC_PER_NODE", 0) or local_world_size(parallel, nodes)


def local_world_size(parallel: ParallelSection, nodes: int) -> int:
    """Return this node's number of ranks: one per GPU, or fewer if the recipe's mesh is smaller. Without a GPU, it is
    the number that the mesh or `on_cpu` asks for, at least 1."""
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        return max(1, math.prod(parallel.given_on_cpu) // nodes)
    if "auto" in (parallel.replicas, parallel.shards):
        return gpus
    return min(gpus, max(1, parallel.replicas * parallel.shards // nodes))
