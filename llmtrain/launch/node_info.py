"""Information that launchers of nodes exchange before any rank is started, and the check that nodes belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmtrain.consistency import inconsistency
from llmtrain.errors import RecipeError, TrainingError


@dataclass(frozen=True)
class NodeInfo:
    """Description of one node by its launcher."""

    processes: int = 1
    """Number of processes that the node starts."""
    gpus: int = 0
    common: Mapping[str, str] = field(default_factory=dict)
    """Values of the recipe and the code that must be the same on all nodes."""
    refusal: str = ""
    """Why this node can't train the recipe; empty if it can."""


def check_nodes(nodes: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Raise RecipeError if nodes differ in their recipes, versions or numbers of processes, or if one refuses the recipe. Raise
    TrainingError instead if GPUs may be missing: numbers of GPUs and of processes differ, or only some nodes have GPUs. `nodes`
    has the fields of each node's NodeInfo, which may be of another version, and `names` the nodes' names."""
    if differs := inconsistency(
        [node["common"] for node in nodes], lambda indices: ", ".join(names[i] for i in indices)
    ):
        raise RecipeError(
            f"nodes have different recipes or versions: {differs}; start the same command, recipe files and version of llmtrain "
            "on all nodes"
        )
    processes, gpus = [node["processes"] for node in nodes], [node["gpus"] for node in nodes]
    fewest, most = min(gpus), max(gpus)
    differ = len(set(processes)) > 1
    if fewest < most and (differ or not fewest):  # first, because a node refuses the recipe if it finds too few
        raise TrainingError(  # not RecipeError: the next start may find the GPUs
            f"{names[gpus.index(fewest)]} has {fewest} usable GPUs, {names[gpus.index(most)]} has {most}; see "
            "`nvidia-smi` on the former, or set NPROC_PER_NODE on all of them"
        )
    if differ:
        starts = ", ".join(f"{name} starts {number}" for name, number in zip(names, processes, strict=True))
        raise RecipeError(
            f"nodes need the same number of processes, but {starts}; set NPROC_PER_NODE={min(processes)} on all of them"
        )
    for name, node in zip(names, nodes, strict=True):
        if node["refusal"]:
            raise RecipeError(f"{node['refusal']} ({name})")
