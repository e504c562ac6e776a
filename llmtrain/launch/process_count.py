"""How many ranks this node starts."""

from __future__ import annotations

import math

from llmtrain.config import ParallelSection
from llmtrain.launch.nodes import number


def processes_per_node(parallel: ParallelSection, nodes: int) -> int:
    """NPROC_PER_NODE, or what `local_world_size` says. Raises RecipeError if it is set to something else than a number."""
    return number("NPROC_PER_NODE", 0) or local_world_size(parallel, nodes)


def local_world_size(parallel: ParallelSection, nodes: int) -> int:
    """One a GPU, or fewer if the recipe's mesh is smaller; on a CPU what the mesh or `on_cpu` asks for (else 1)."""
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        return max(1, math.prod(parallel.given_on_cpu) // nodes)
    if "auto" in (parallel.replicas, parallel.shards):
        return gpus
    return min(gpus, max(1, parallel.replicas * parallel.shards // nodes))
