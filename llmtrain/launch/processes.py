"""How many ranks this node starts."""

from __future__ import annotations

import math

from llmtrain.launch.nodes import number


def processes_per_node(replicas: int | str, shard: int | str, nodes: int) -> int:
    """NPROC_PER_NODE, or what `processes_here` says. Raises RecipeError if it is set to something else than a number."""
    return number("NPROC_PER_NODE", 0) or processes_here(replicas, shard, nodes)


def processes_here(replicas: int | str, shard: int | str, nodes: int) -> int:
    """One a GPU, or fewer if the recipe's mesh is smaller; on a CPU what the mesh asks for (1 for `auto`)."""
    import torch

    given = [int(size) for size in (replicas, shard) if size != "auto"]
    asked, gpus = max(1, math.prod(given) // nodes), torch.cuda.device_count()
    if gpus == 0:
        return asked
    return min(gpus, asked) if len(given) == 2 else gpus
