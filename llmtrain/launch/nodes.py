"""Nodes of a launch and the number of this node, from NNODES and related variables or from Slurm."""

from __future__ import annotations

import os
from dataclasses import dataclass

from llmtrain.errors import RecipeError
from llmtrain.parallel.world import master_endpoint

DEFAULT_PORT = 29400


@dataclass(frozen=True)
class Nodes:
    """Node count, this node's number, and the endpoint of node 0. A single node uses any free port instead."""

    count: int = 1
    rank: int = 0
    address: str = "localhost"
    port: int = DEFAULT_PORT

    @classmethod
    def from_environment(cls) -> Nodes:
        """Return the nodes from NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT if NNODES is set, else from the
        Slurm step if it has one task per node, else this node alone. Raises RecipeError if the variables are
        incomplete or contradict each other."""
        if "NNODES" in os.environ:
            return cls._from_variables(number("NNODES", 1))
        if "SLURM_STEP_NUM_TASKS" in os.environ:
            return cls._from_slurm(number("SLURM_STEP_NUM_TASKS", 1), number("SLURM_STEP_NUM_NODES", 1))
        if number("SLURM_JOB_NUM_NODES", 1) > 1:
            raise RecipeError(
                f"this Slurm job has {os.environ['SLURM_JOB_NUM_NODES']} nodes, but srun did not start launch/train.sh, "
                "so the others would idle; write srun --ntasks-per-node=1 before it, or set NNODES=1 to use one node"
            )
        return cls()

    @classmethod
    def _from_variables(cls, count: int) -> Nodes:
        if count <= 1:
            return cls()
        missing = [name for name in ("NODE_RANK", "MASTER_ADDR") if name not in os.environ]
        if missing:
            raise RecipeError(
                f"NNODES={count} needs {' and '.join(missing)} in the environment: "
                "NODE_RANK is this node's number, MASTER_ADDR is node 0's address"
            )
        rank = number("NODE_RANK", 0)
        if rank >= count:
            raise RecipeError(f"NODE_RANK={rank} is not one of the {count} nodes of NNODES; they are 0 to {count - 1}")
        return cls(count, rank, os.environ["MASTER_ADDR"], number("MASTER_PORT", DEFAULT_PORT))

    @classmethod
    def _from_slurm(cls, tasks: int, nodes: int) -> Nodes:
        if tasks == 1:
            return cls()
        if tasks != nodes:
            raise RecipeError(
                f"srun started launch/train.sh {tasks} times on {nodes} nodes; start it once per node (--ntasks-per-node=1), "
                "or once per rank without it: srun python -m llmtrain train RECIPE"
            )
        address, port = master_endpoint()
        return cls(nodes, number("SLURM_NODEID", 0), address, int(port))


def number(name: str, default: int) -> int:
    """Return an environment variable as an integer of at least 0. Raises RecipeError if it is anything else."""
    text = os.environ.get(name, str(default))
    if not text.isdigit():
        raise RecipeError(f"{name}={text!r} in the environment is not a number")
    return int(text)
