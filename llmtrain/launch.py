"""Start torchrun on this machine for a recipe: how many processes, and what their end means."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from llmtrain.errors import DONE, FAILED, STOPPED_EARLY, RecipeError
from llmtrain.recipe import load_recipe
from llmtrain.recipe_check import check, check_vocabulary


def launch_torchrun(recipe_path: Path, overrides: Sequence[str]) -> int:
    """Check the recipe and prepare its data here, once, then run `llmtrain train` in as many processes as it needs.

    Returns their exit code. Raises UserError before anything is started.
    """
    recipe = load_recipe(recipe_path, overrides)
    nodes = _number("NNODES", 1)
    per_node = _number("NPROC_PER_NODE", 0) or processes_here(recipe.parallel.replicas, recipe.parallel.shard, nodes)
    check(recipe, nodes * per_node)

    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    from llmtrain.train.run import prepare_for
    from llmtrain.train.rundir import RunDirectory

    directory = RunDirectory(recipe)
    directory.check_recipe()
    if directory.finished():
        print(directory.already_complete())
        return DONE
    check_vocabulary(recipe, prepare_for(recipe, show_progress=True).vocab_size)

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // per_node)))
    where = ["--standalone"]
    if nodes > 1:
        for name in ("NODE_RANK", "MASTER_ADDR"):
            if name not in os.environ:
                raise RecipeError(
                    f"NNODES={nodes} needs {name} in the environment: this node's number, and node 0's address"
                )
        port = os.environ.get("MASTER_PORT", "29400")
        where = [
            "--node-rank",
            os.environ["NODE_RANK"],
            "--master-addr",
            os.environ["MASTER_ADDR"],
            "--master-port",
            port,
        ]
    command = ["--nnodes", str(nodes), "--nproc-per-node", str(per_node), *where]
    try:
        run(parse_args([*command, "-m", "llmtrain", "train", str(recipe_path), *overrides]))
    except ChildFailedError as error:
        # Ranks that were ended because another had failed have negative codes.
        return max(FAILED, *(failure.exitcode for failure in error.failures.values()))
    except SignalException:  # passed on to the ranks, which then had the time to write a checkpoint
        summary = directory.summary()
        return STOPPED_EARLY if summary and summary["stopped"] == "signal" else FAILED
    return DONE


def processes_here(replicas: int | str, shard: int | str, nodes: int) -> int:
    """One a GPU, or fewer if the recipe's mesh is smaller; on a CPU what the mesh asks for (1 for `auto`)."""
    import torch

    given = [int(size) for size in (replicas, shard) if size != "auto"]
    asked, gpus = max(1, math.prod(given) // nodes), torch.cuda.device_count()
    if gpus == 0:
        return asked
    return min(gpus, asked) if len(given) == 2 else gpus


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdigit():
        raise RecipeError(f"{name}={text!r} in the environment is not a number")
    return int(text)
