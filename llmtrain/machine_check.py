"""Checks of a recipe that depend on the devices and packages of this machine. They apply only to a start on this machine."""

from __future__ import annotations

import importlib.util

import torch

from llmtrain.config import ParallelSection, Recipe
from llmtrain.errors import RecipeError


def check_machine(recipe: Recipe) -> None:
    """Raise RecipeError if the recipe needs NCCL and this machine has no GPU, if NCCL would need two networks in one process,
    or if the recipe needs DeepSpeed or wandb and it is not installed."""
    if not recipe.parallel.in_process:
        _check_backend(recipe.parallel)
    if recipe.parallel.engine == "zero" and importlib.util.find_spec("deepspeed") is None:
        raise RecipeError(
            "parallel.engine is zero, but DeepSpeed is not installed; pip install -c constraints.txt -e '.[zero]', or engine=fsdp2"
        )
    _check_log(recipe)


def _check_backend(parallel: ParallelSection) -> None:
    if not torch.cuda.is_available():
        if parallel.replica_backend == "nccl":
            raise RecipeError(
                "parallel.replica_backend is nccl, which needs GPUs, and there is none here; use auto or gloo"
            )
        return
    networks = (parallel.replica_network, parallel.shard_network)
    if (
        parallel.shard_across_nodes
        and parallel.replica_backend != "gloo"
        and None not in networks
        and len({*networks}) > 1
    ):
        raise RecipeError(
            f"parallel.replica_network is {networks[0]} and parallel.shard_network {networks[1]}, but with "
            "shard_across_nodes=true both are nccl's, which uses one network in a process; give both the same, or "
            "parallel.replica_backend=gloo"
        )


def _check_log(recipe: Recipe) -> None:
    if recipe.log.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise RecipeError("log.wandb is given, but wandb is not installed; pip install wandb, or log.wandb=null")
