"""Replicas in one process: threads that take turns on one device and exchange messages by copies in its memory.

Methods can thus be compared on a laptop, or on a single GPU, where NCCL allows only one rank. A replica trains as it
would in its own process with as many threads. Sums are taken in the order of the replicas. Two replicas therefore get
the same bits as two processes, and more than two get the same bits for messages of rounded values. Other sums differ
from those of processes by rounding errors, because gloo and NCCL add in other orders.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from llmtrain.errors import TrainingError
from llmtrain.parallel.comms import ALL_GATHER, Comms
from llmtrain.parallel.mesh import Mesh, local_device
from llmtrain.parallel.network import Networks, using_interface
from llmtrain.parallel.ranks import Ranks
from llmtrain.parallel.rendezvous import Peers, RankInfo
from llmtrain.parallel.virtual_clock import VirtualClock
from llmtrain.parallel.world import World, node_name
from llmtrain.turns import Turns

T = TypeVar("T")
AXES = ("replica", "world", "checkpoints")
"""Axes that have a group of all replicas; see `Mesh.replica_comms`, `all_ranks` and `checkpoint_group`."""
ALONE = World(0, 1, 0, 1)
"""This process as the only rank."""


class InProcess(Ranks):
    """The ranks of a run in one process: its replicas, each on its own thread."""

    def __init__(
        self,
        replicas: int,
        timeout_seconds: float,
        networks: Networks | None = None,
        clocks: Sequence[VirtualClock] = (),
    ):
        """Prepare for `replicas` replicas. A replica's wait fails after `timeout_seconds` in which no replica has run.
        `networks` are the recipe's interfaces, over which no message is sent. `clocks` are the replicas' virtual
        clocks, if the recipe gives them."""
        self.networks = networks or Networks()
        self.clocks = list(clocks) or [None] * replicas
        self.turns = Turns(replicas, timeout_seconds)
        self.device = local_device(ALONE)
        self._groups = {axis: MemoryGroup(self.turns) for axis in AXES}
        self.shard_mesh: DeviceMesh | None = None
        """`Mesh.shard_mesh` of every replica, with this process as the only rank; None until `run`."""

    def run(self, train: Callable[[World], T]) -> T:
        """Call `train` with each replica's rank on the replica's own thread, and return the first replica's result.
        Raises the first error of any replica."""
        size = self.turns.count
        with using_interface(self.networks.replica):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(minutes=1))
        try:
            self.shard_mesh = DeviceMesh.from_group(dist.group.WORLD, self.device.type, mesh_dim_names=("shard",))
            return self.turns.run(lambda rank: train(World(rank, size, rank, size)))[0]
        finally:
            dist.destroy_process_group()

    def find_peers(self, memory: Callable[[World], float]) -> Peers:
        """Return this process as the only one."""
        rank_info = RankInfo(node_name(), socket.gethostname(), None, memory(ALONE))
        return Peers(None, [rank_info], self.networks)

    @contextmanager
    def open_mesh(self, world: World, peers: Peers | None = None, shards: int = 1) -> Iterator[Mesh]:
        """Provide the mesh as the replica with rank `world.rank` sees it. Called on the replica's own thread, which needs
        no `peers`."""
        assert shards == 1, shards
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        clock = self.clocks[world.rank]
        replica, all_ranks, checkpoints = (
            MemoryComms(self._groups[axis], world.rank, axis, self.device, clock if axis == "replica" else None)
            for axis in AXES
        )
        yield Mesh(
            world=world,
            device=self.device,
            shard_mesh=self.shard_mesh,
            replica_comms=replica,
            shard_comms=Comms(None, self.device, "shard"),
            all_ranks=all_ranks,
            checkpoint_group=checkpoints,
            clock=clock,
        )


class Call:
    """One collective, which holds the contributions of the ranks until it is complete, and then the result."""

    def __init__(self, signature: tuple[Any, ...]):
        self.signature, self.is_complete = signature, False
        self.parts: dict[int, Any] = {}
        self.result: Any = None
        self.time = 0.0
        """Latest virtual time at which a rank began the collective."""


class MemoryGroup:
    """Group of all replicas, and its collectives. Every rank begins the collectives in the same order."""

    def __init__(self, turns: Turns):
        self.turns = turns
        self._begun = [0] * turns.count
        self._calls: dict[int, Call] = {}

    def begin(
        self, rank: int, signature: tuple[Any, ...], part: T, complete: Callable[[list[T]], Any], time: float = 0.0
    ) -> Call:
        """Contribute `part` to the next collective of this rank, at the virtual time `time`. The last rank to do so
        calls `complete` with all parts in rank order; its return value is the result. `signature` describes the
        collective, and must be equal on all ranks.

        Raises TrainingError if the others have begun another collective or a replica has failed.
        """
        with self.turns.changed:
            if self.turns.stopped is not None:
                raise TrainingError(self.turns.stopped)
            number, self._begun[rank] = self._begun[rank], self._begun[rank] + 1
            call = self._calls.setdefault(number, Call(signature))
            if call.signature != signature:
                raise TrainingError(f"other replicas began {call.signature}, this one {signature}")
            call.parts[rank] = part
            call.time = max(call.time, time)
            is_last = len(call.parts) == self.turns.count
        if is_last:
            call.result = complete([call.parts[other] for other in range(self.turns.count)])
            with self.turns.changed:
                del self._calls[number]
                call.is_complete = True
                call.parts.clear()  # frees the parts, because other ranks may hold the call for long
                self.turns.changed.notify_all()
        return call

    def wait(self, call: Call) -> None:
        """Wait until a collective is complete. Raises TrainingError as `Turns.wait_for` does."""

        def missing() -> str:
            return "replica " + ", ".join(str(rank) for rank in range(self.turns.count) if rank not in call.parts)

        self.turns.wait_for(lambda: call.is_complete, missing)


class MemoryWork:
    """A collective in flight, with the methods of torch.distributed's Work that `PendingCollective` calls."""

    def __init__(self, group: MemoryGroup, call: Call, clock: VirtualClock | None):
        self._group, self._call, self._clock = group, call, clock

    def is_completed(self) -> bool:
        """Return whether the result is available."""
        return self._call.is_complete

    def wait(self) -> bool:
        """Wait for the result."""
        self._group.wait(self._call)
        if self._clock is not None:
            self._clock.wait_until(self._call.time)
        return True


class MemoryComms(Comms):
    """Communicator of one replica with the others in its process. Bytes are counted as if they were sent over a network."""

    shares_memory = True

    def __init__(
        self, group: MemoryGroup, rank: int, axis: str, device: torch.device, clock: VirtualClock | None = None
    ):
        super().__init__(None, device, axis)
        self._memory, self.rank, self.size = group, rank, group.turns.count
        self.turns, self.clock = group.turns, clock

    def with_own_traffic(self) -> Comms:
        """Return a communicator for the same group with its own counters, for messages that do not belong to training
        and take no virtual time."""
        other = super().with_own_traffic()
        other.clock = None
        return other

    def start_work(self, what: str, sent: float, collective: Callable[..., dist.Work], *tensors: Any) -> MemoryWork:
        self.traffic.bytes += sent
        result, *rest = (tensor.detach() for tensor in tensors)
        signature = (what, collective.__name__, tuple(result.shape), result.dtype)
        time = 0.0 if self.clock is None else self.clock.now
        try:
            call = self._memory.begin(self.rank, signature, (result, *rest), COMPLETE[collective], time)
            return MemoryWork(self._memory, call, self.clock)
        except TrainingError as error:
            raise self.failure(what, error) from error

    def all_gather_object(self, value: T, what: str) -> list[T]:
        """Return every replica's `value` in rank order: the objects themselves, which must not be changed."""
        try:
            call = self._memory.begin(self.rank, (what, "objects"), value, tuple)
            self._memory.wait(call)
        except TrainingError as error:
            raise self.failure(what, error) from error
        return list(call.result)

    def broadcast_object(self, value: T, what: str) -> T:
        return self.all_gather_object(value, what)[0]

    def failure(self, what: str, error: Exception) -> TrainingError:
        me = f"replica {self.rank} of {self.size} in one process"
        return TrainingError(f"{what} over the {self.axis} axis failed on {me}: {error}")


@torch.no_grad()
def _all_reduce(parts: list[tuple[torch.Tensor]]) -> None:
    (total,), *others = parts
    for (part,) in others:
        total += part
    for (part,) in others:
        part.copy_(total)


@torch.no_grad()
def _all_gather(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for gathered, _ in parts:
        torch.cat([sent for _, sent in parts], out=gathered)


@torch.no_grad()
def _all_to_all(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for rank, (received, _) in enumerate(parts):
        torch.cat([sent.chunk(len(parts))[rank] for _, sent in parts], out=received)


COMPLETE: dict[Callable[..., Any], Callable[[list[Any]], None]] = {
    dist.all_reduce: _all_reduce,
    ALL_GATHER: _all_gather,
    dist.all_to_all_single: _all_to_all,
}
"""Functions that carry out torch.distributed's collectives in place, given each rank's tensors (output first) in rank order."""
