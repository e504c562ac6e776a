"""Mesh of ranks with the axes (replica, shard), shard innermost, and its construction."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from llmtrain.config import ParallelSection
from llmtrain.errors import RecipeError, TrainingError, UserError, first_line, one_line
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.connections import connections_for, longest_round_trip
from llmtrain.parallel.network import Networks, using_interface
from llmtrain.parallel.rendezvous import Peers, RankInfo, check_connectivity, find_peers
from llmtrain.parallel.virtual_clock import VirtualClock
from llmtrain.parallel.world import SHARE_GPU, World, may_share_gpu
from llmtrain.quantities import counted

T = TypeVar("T")
BOUND_TO_ONE_GPU = re.compile(r"\b(single|per_task):1\b")
"""Slurm's ways of binding one task to each GPU (`srun --gpu-bind`)."""


@dataclass(frozen=True)
class Mesh:
    """Mesh of replicas x shards ranks, as one rank sees it: its device and the communicators along the axes."""

    world: World
    device: torch.device
    shard_mesh: DeviceMesh
    """The ranks of this replica as a one-dimensional DeviceMesh, `shard`, for DTensor and FSDP."""
    replica_comms: Comms
    """The ranks that hold the same shard, one per replica, on the slow network."""
    shard_comms: Comms
    """The ranks of this replica, on the fast network."""
    all_ranks: Comms
    """All ranks, over CPU tensors. This group carries metrics and agreement, never weights."""
    checkpoint_group: Comms
    """Second group of all ranks, for background threads that write checkpoints."""
    store: dist.Store | None = None
    """The job's key-value store; None for a single process."""
    unencrypted: str | None = None
    """Warning about messages that cross a public network unencrypted, or None."""
    clock: VirtualClock | None = None
    """Virtual clock of this replica, if the replicas share a process and the recipe gives clocks."""

    @property
    def replicas(self) -> int:
        return self.replica_comms.size

    @property
    def virtual_seconds(self) -> float:
        """Seconds on the replica's virtual clock; 0 without a clock."""
        return self.clock.now if self.clock is not None else 0.0

    @property
    def is_main(self) -> bool:
        return self.world.rank == 0

    def broadcast_from_main(self, ask: Callable[[], T]) -> T:
        """Call `ask` on the main rank and return its result on every rank. If it raises a UserError or TrainingError,
        every rank raises that error; for an OSError, every rank raises a TrainingError. A collective of all ranks."""
        answer: T | UserError | TrainingError | None = None
        if self.is_main:
            try:
                answer = ask()
            except (UserError, TrainingError) as error:
                answer = error
            except OSError as error:
                answer = TrainingError(f"rank 0 on {socket.gethostname()}: {one_line(error)}")
        answer = self.all_ranks.broadcast_object(answer, "hearing from rank 0")
        if isinstance(answer, UserError | TrainingError):
            raise answer
        return answer


def local_device(world: World) -> torch.device:
    """Return this process's GPU by its local rank, or the CPU. Raises RecipeError if the node has fewer GPUs than ranks, unless
    ranks may share GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus == 1 and _has_gpu_of_its_own(world):
        return torch.device("cuda", 0)
    if world.local_rank >= gpus and not may_share_gpu():
        raise RecipeError(
            f"{world.local_size} processes on a machine with {counted(gpus, 'GPU')}; start one process per GPU, or set {SHARE_GPU}=1 to "
            "let replicas share one"
        )
    return torch.device("cuda", world.local_rank % gpus)


def _backend_between(ranks: Sequence[RankInfo], shards: int, replica_backend: str) -> str:
    """Return the backend between replicas: gloo if some of them share a GPU, because NCCL allows one rank per GPU.

    Raises RecipeError if the recipe asks for NCCL nevertheless, or if the ranks of one replica would share a GPU.
    """
    if max(rank_info.ranks_per_gpu for rank_info in ranks) == 1:
        return replica_backend
    if shards > 1:
        raise RecipeError(
            f"parallel.shards is {shards}, but {SHARE_GPU}=1 puts several ranks on a GPU, and NCCL between the shards allows one; "
            "use parallel.shards=1"
        )
    if replica_backend == "nccl":
        raise RecipeError(
            f"parallel.replica_backend is nccl, but {SHARE_GPU}=1 puts several replicas on a GPU, and NCCL allows one; use auto "
            "or gloo"
        )
    return "gloo"


def _has_gpu_of_its_own(world: World) -> bool:
    """Return whether Slurm has started each rank with access to its own GPU only (`srun --gpus-per-task=1`,
    `--ntasks-per-gpu=1` or `--gpu-bind=single:1`)."""
    env = os.environ
    by_task = "SLURM_GPUS_PER_TASK" in env or "gres/gpu" in env.get("SLURM_TRES_PER_TASK", "")
    by_gpu = env.get("SLURM_NTASKS_PER_GPU") == "1"
    bound = any(BOUND_TO_ONE_GPU.search(env.get(name, "")) for name in ("SLURM_GPU_BIND", "SLURM_TRES_BIND"))
    return (by_task or by_gpu or bound) and os.environ.get("SLURM_PROCID") == str(world.rank)


@contextmanager
def open_process_mesh(
    world: World,
    *,
    replicas: int,
    shards: int,
    replica_backend: str,
    timeout_seconds: float,
    peers: Peers | None = None,
    connections: int | Literal["auto"] = "auto",
) -> Iterator[Mesh]:
    """Build a mesh of `replicas` x `shards` processes for the enclosed code, and destroy its process groups on exit, except after an
    error on GPUs. A collective of all ranks.

    `peers` is the result of `find_peers`; without it, this function calls `find_peers`. `connections` is the recipe's key. Every
    collective fails after `timeout_seconds`. Raises TrainingError if the ranks do not reach one another.
    """
    timeout = timedelta(seconds=timeout_seconds)
    peers = peers or find_peers(world, ParallelSection(), lambda: 0.0, timeout_seconds)
    device = local_device(world)
    replica_backend = _backend_between(peers.ranks, shards, replica_backend)
    unencrypted = check_connectivity(peers, world, replicas, shards, timeout_seconds)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        replicas_use_nccl = replicas > 1 and replica_backend != "gloo"
        peers.recipe_networks.set_nccl_interface(replicas_use_nccl)
        if replicas_use_nccl and shards > 1:
            # Kernels of two NCCL communicators deadlock if two GPUs run them in different orders (NCCL's guide, "Using
            # multiple NCCL communicators concurrently"). All hosts launch them in the same order, which NCCL then keeps.
            os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    with using_interface(peers.networks.replica):  # also for the groups that libraries create
        _join(world, peers, "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout)
        try:
            yield build_mesh(
                world,
                device,
                replicas=replicas,
                shards=shards,
                replica_backend=replica_backend,
                timeout=timeout,
                store=peers.store,
                networks=peers.networks,
                unencrypted=unencrypted,
                connections=connections,
            )
        except BaseException:
            if device.type != "cuda":  # NCCL would wait here for collectives that the other ranks never join
                dist.destroy_process_group()
            raise
        dist.destroy_process_group()


def build_mesh(
    world: World,
    device: torch.device,
    *,
    replicas: int,
    shards: int,
    replica_backend: str,
    timeout: timedelta,
    store: dist.Store | None = None,
    networks: Networks | None = None,
    unencrypted: str | None = None,
    connections: int | Literal["auto"] = 1,
) -> Mesh:
    """Build a mesh of `replicas` x `shards` ranks over the existing process group. A collective of all ranks."""
    assert replicas * shards == world.size, (replicas, shards, world.size)
    networks = networks or Networks()
    backend = replica_backend if replica_backend != "auto" else ("nccl" if device.type == "cuda" else "gloo")
    with using_interface(networks.shard):
        within = [[r * shards + s for s in range(shards)] for r in range(replicas)]
        shard_group = _my_group(world, within, None, timeout)
    with using_interface(networks.replica):
        # Separate groups, so that traffic between replicas has its own backend and never queues behind FSDP's traffic.
        across = [[r * shards + s for r in range(replicas)] for s in range(shards)]
        replica_group = _my_group(world, across, backend, timeout) if replicas > 1 else None
        several = world.size > 1
        all_ranks = dist.new_group(backend="gloo", timeout=timeout) if several else None
        checkpoint_group = dist.new_group(backend="gloo", timeout=timeout) if several else None
    mesh = Mesh(
        world=world,
        device=device,
        shard_mesh=DeviceMesh.from_group(shard_group, device.type, mesh_dim_names=("shard",)),
        replica_comms=Comms(replica_group, device, "replica", networks.replica),
        shard_comms=Comms(shard_group if shards > 1 else None, device, "shard", networks.shard),
        all_ranks=Comms(all_ranks, axis="world", interface=networks.replica),
        checkpoint_group=Comms(checkpoint_group, axis="world", interface=networks.replica),
        store=store,
        unencrypted=unencrypted,
    )
    for comms in (mesh.shard_comms, mesh.replica_comms):
        comms.connect()
    if mesh.replica_comms.is_gloo:
        if connections == "auto":
            is_one_host = world.local_size == world.size
            connections = 1 if is_one_host else connections_for(longest_round_trip(mesh.replica_comms, mesh.all_ranks))
        with using_interface(networks.replica):
            more = [_my_group(world, across, backend, timeout) for _ in range(connections - 1)]
        mesh.replica_comms.add_groups(more)
    return mesh


def _my_group(world: World, groups: list[list[int]], backend: str | None, timeout: timedelta) -> dist.ProcessGroup:
    """Create the process groups for `groups`, disjoint lists that cover all ranks, and return this rank's. A collective of all
    ranks, because every rank must take part in creating every group."""
    made = {tuple(ranks): dist.new_group(ranks, backend=backend, timeout=timeout) for ranks in groups}
    return next(group for ranks, group in made.items() if world.rank in ranks)


def _join(world: World, peers: Peers, backend: str, timeout: timedelta) -> None:
    store = dist.HashStore() if peers.store is None else dist.PrefixStore("process groups", peers.store)
    try:
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        rank_info = peers.ranks[world.rank]
        raise TrainingError(
            f"rank {world.rank} of {world.size} on {rank_info.host} could not connect to the others over "
            f"{peers.networks.replica or 'the card that gloo found'}: {first_line(error)}"
        ) from error
