"""Nodes of a launch, and this node's number and its number of ranks, from NNODES and related variables or from Slurm."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from llmtrain.config import ParallelSection
from llmtrain.errors import RecipeError
from llmtrain.parallel.world import (
    MAX_PORT,
    check_is_alone,
    environment_number,
    gpu_count,
    is_slurm_task,
    master_endpoint,
    may_share_gpu,
    slurm_step,
)

DEFAULT_PORT = 29400


@dataclass(frozen=True)
class Nodes:
    """Number of nodes, this node's number, and the endpoint of node 0. A single node uses any free port instead."""

    count: int = 1
    rank: int = 0
    address: str = "localhost"
    port: int = DEFAULT_PORT
    step: str = ""
    """Number of the Slurm step that has these nodes; empty if they are not from Slurm."""

    @classmethod
    def from_environment(cls) -> Nodes:
        """Return the nodes from NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT if NNODES is set, else from the
        Slurm step if it has one task per node, else this node alone. Raises RecipeError if the variables are
        incomplete or contradict each other, or if an unknown launcher has started several processes."""
        if "NNODES" in os.environ:
            return cls._from_variables(environment_number("NNODES", 1, minimum=1))
        if is_slurm_task():
            return cls._from_slurm(
                environment_number("SLURM_STEP_NUM_TASKS", 1), environment_number("SLURM_STEP_NUM_NODES", 1)
            )
        if environment_number("SLURM_JOB_NUM_NODES", 1) > 1:
            raise RecipeError(
                f"this Slurm job has {os.environ['SLURM_JOB_NUM_NODES']} nodes, but srun did not start launch/train.sh, "
                "so the others would idle; write srun --ntasks-per-node=1 before it, or set NNODES=1 to use one node"
            )
        check_is_alone("set NNODES, NODE_RANK and MASTER_ADDR on each node (NNODES=1 for a node alone)")
        return cls()

    @classmethod
    def _from_variables(cls, count: int) -> Nodes:
        tasks = environment_number("SLURM_STEP_NUM_TASKS", 1) if is_slurm_task() else 1
        if tasks not in (1, count):
            raise RecipeError(
                f"NNODES={count} in the environment, but srun started launch/train.sh {tasks} times; unset NNODES, which is not "
                f"needed with srun, or set NNODES={tasks}; for a run per task, unset SLURM_STEP_NUM_TASKS in each"
            )
        if count == 1:
            return cls()
        missing = [name for name in ("NODE_RANK", "MASTER_ADDR") if not os.environ.get(name, "").strip()]
        if missing:
            raise RecipeError(
                f"NNODES={count} needs {' and '.join(missing)} in the environment: "
                "NODE_RANK is this node's number, MASTER_ADDR is node 0's address"
            )
        rank = environment_number("NODE_RANK", 0)
        if rank >= count:
            raise RecipeError(f"NODE_RANK={rank} is not one of the {count} nodes of NNODES; they are 0 to {count - 1}")
        address = os.environ["MASTER_ADDR"]
        try:
            address.encode("idna")
        except UnicodeError as error:
            raise RecipeError(
                f"MASTER_ADDR={address} is not a host name ({error}); give node 0's name or IP address"
            ) from error
        return cls(count, rank, address, environment_number("MASTER_PORT", DEFAULT_PORT, 1, MAX_PORT))

    @classmethod
    def _from_slurm(cls, tasks: int, nodes: int) -> Nodes:
        if tasks == 1:
            return cls()
        if tasks != nodes:
            raise RecipeError(
                f"srun started launch/train.sh {tasks} times on {nodes} nodes; start it once per node (--ntasks-per-node=1), or start "
                "one task per rank without it: srun llmtrain train RECIPE"
            )
        address, port = master_endpoint()
        return cls(nodes, environment_number("SLURM_NODEID", 0), address, int(port), slurm_step())


def processes_per_node(parallel: ParallelSection, nodes: int) -> int:
    """Return NPROC_PER_NODE, or `local_world_size` if that variable is unset or 0. Raises RecipeError if it is not a number."""
    return environment_number("NPROC_PER_NODE", 0) or local_world_size(parallel, nodes)


def check_thread_count() -> None:
    """Raise RecipeError if OMP_NUM_THREADS is set to anything but numbers, one per nesting level."""
    text = os.environ.get("OMP_NUM_THREADS", "1")
    if not all(part.strip().isascii() and part.strip().isdigit() and int(part) > 0 for part in text.split(",")):
        raise RecipeError(f"OMP_NUM_THREADS={text!r} in the environment is not a number of threads; unset it, or set 1")


def local_world_size(parallel: ParallelSection, nodes: int) -> int:
    """Return the number of rank processes on this node. With GPUs, it is one per GPU, fewer if the recipe's mesh is smaller,
    and more if the mesh is larger and ranks may share a GPU. Without GPUs, it is the number that the mesh or
    `parallel.on_cpu` asks for, at least 1. With `parallel.in_process`, it is 1."""
    if parallel.in_process:
        return 1
    gpus = gpu_count()
    if not gpus:
        return max(1, math.prod(parallel.given_on_cpu) // nodes)
    if "auto" in (parallel.replicas, parallel.shards):
        return gpus
    asked = max(1, parallel.replicas * parallel.shards // nodes)
    return asked if may_share_gpu() else min(gpus, asked)
