"""Who this process is, and the mesh (replica, shard) it is part of, shard innermost.

Ranks come from the environment: torchrun's and DeepSpeed's variables, then Slurm's, else one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llmtrain.errors import RecipeError, TrainingError, UserError
from llmtrain.parallel.comms import Comms

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Ranks as the launcher gave them."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def from_environment(cls) -> World:
        """Read the launcher's variables. Raises RecipeError when they contradict each other."""
        env = os.environ
        if "RANK" in env and "WORLD_SIZE" in env:
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
            defaults = {"LOCAL_RANK": env["RANK"], "LOCAL_WORLD_SIZE": env["WORLD_SIZE"]}
        elif int(env.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in env:
            names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
            defaults = {"SLURM_NTASKS_PER_NODE": str(int(env["SLURM_NTASKS"]) // int(env.get("SLURM_NNODES", "1")))}
        else:
            return cls(0, 1, 0, 1)
        try:
            rank, size, local_rank, local_size = (int(env.get(name) or defaults[name]) for name in names)
        except (KeyError, ValueError) as error:
            raise RecipeError(
                f"environment: {', '.join(names)} must be whole numbers, got {error}; start with torchrun or srun"
            ) from error
        if not 0 <= rank < size or not 0 <= local_rank < local_size:
            raise RecipeError(
                f"environment: rank {rank} of {size}, local rank {local_rank} of {local_size} is impossible; check the launcher"
            )
        return cls(rank, size, local_rank, local_size)


@dataclass(frozen=True)
class Mesh:
    """`replicas` x `shard` ranks and this rank's place among them."""

    world: World
    device: torch.device
    devices: DeviceMesh
    replica: Comms
    """The ranks that hold the same shard, one a replica; the slow network."""
    shard: Comms
    """The ranks of this replica; the fast network."""
    everyone: Comms
    """All ranks, over CPU tensors: metrics and agreement, never weights."""

    @property
    def replicas(self) -> int:
        return self.replica.size

    @property
    def is_main(self) -> bool:
        return self.world.rank == 0

    def from_main(self, ask: Callable[[], T]) -> T:
        """The main rank's `ask()` on every rank; a UserError it raises is raised on every rank."""
        answer: list[T | UserError | None] = [None]
        if self.is_main:
            try:
                answer[0] = ask()
            except UserError as error:
                answer[0] = error
        if self.world.size > 1:
            dist.broadcast_object_list(answer, group=self.everyone.group)
        if isinstance(answer[0], UserError):
            raise answer[0]
        return answer[0]


def local_device(world: World) -> torch.device:
    """This process's GPU by its local rank, or the CPU. Raises RecipeError if there are fewer GPUs than ranks."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if world.local_rank >= torch.cuda.device_count():
        raise RecipeError(
            f"{world.local_size} processes on a machine with {torch.cuda.device_count()} GPUs; start one process a GPU"
        )
    return torch.device("cuda", world.local_rank)


@contextmanager
def open_mesh(world: World, replicas: int, shard: int, replica_backend: str, timeout_seconds: float) -> Iterator[Mesh]:
    """Meet the other ranks, build the mesh, and leave in order.

    Every collective fails after `timeout_seconds`. Raises TrainingError when the ranks can't meet.
    """
    timeout = timedelta(seconds=timeout_seconds)
    device = local_device(world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _meet(world, "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout)
    try:
        yield build_mesh(world, device, replicas, shard, replica_backend, timeout)
    finally:
        dist.destroy_process_group()


def build_mesh(
    world: World, device: torch.device, replicas: int, shard: int, replica_backend: str, timeout: timedelta
) -> Mesh:
    """The mesh over a process group that is there already. A collective of all ranks."""
    assert replicas * shard == world.size, (replicas, shard, world.size)
    devices = init_device_mesh(device.type, (replicas, shard), mesh_dim_names=("replica", "shard"))
    backend = replica_backend if replica_backend != "auto" else ("nccl" if device.type == "cuda" else "gloo")
    return Mesh(
        world=world,
        device=device,
        devices=devices,
        replica=Comms(_replica_group(world, replicas, shard, backend, timeout), device, "replica"),
        shard=Comms(devices.get_group("shard") if shard > 1 else None, device, "shard"),
        everyone=Comms(dist.new_group(backend="gloo", timeout=timeout) if world.size > 1 else None, axis="world"),
    )


def _replica_group(
    world: World, replicas: int, shard: int, backend: str, timeout: timedelta
) -> dist.ProcessGroup | None:
    """Groups of its own, so that traffic between replicas has its own backend and never queues behind FSDP's."""
    if replicas == 1:
        return None
    mine = None
    for first in range(shard):  # every rank takes part in making every group
        group = dist.new_group(
            [first + shard * replica for replica in range(replicas)], backend=backend, timeout=timeout
        )
        if world.rank % shard == first:
            mine = group
    return mine


def _meet(world: World, backend: str, timeout: timedelta) -> None:
    if world.size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    where = (
        f"{os.environ.get('MASTER_ADDR', 'MASTER_ADDR (unset)')}:{os.environ.get('MASTER_PORT', 'MASTER_PORT (unset)')}"
    )
    try:
        dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise TrainingError(
            f"rank {world.rank} of {world.size} could not meet the others at {where}: {reason}"
        ) from error
