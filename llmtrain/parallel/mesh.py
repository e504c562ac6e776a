"""The mesh (replica, shard) that this process is part of, shard innermost."""

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
from llmtrain.parallel.world import World, meeting_point

T = TypeVar("T")


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
    store: dist.Store | None = None
    """The job's key-value store; None for a single process."""

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
    store = _meet(world, "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout)
    try:
        yield build_mesh(world, device, replicas, shard, replica_backend, timeout, store)
    finally:
        dist.destroy_process_group()


def build_mesh(
    world: World,
    device: torch.device,
    replicas: int,
    shard: int,
    replica_backend: str,
    timeout: timedelta,
    store: dist.Store | None = None,
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
        store=store,
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


def _meet(world: World, backend: str, timeout: timedelta) -> dist.Store | None:
    if world.size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return None
    address, port = meeting_point()
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=port)
    try:
        store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=timeout))
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("process groups", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise TrainingError(
            f"rank {world.rank} of {world.size} could not meet the others at {address}:{port}: {reason}"
        ) from error
    return store
