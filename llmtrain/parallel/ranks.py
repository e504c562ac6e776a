"""Ranks of a run: how they start, meet and form a mesh. Here each rank is a process; in `in_process`, each is a thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TypeVar

from llmtrain.config import ParallelSection
from llmtrain.parallel.mesh import Mesh, open_process_mesh
from llmtrain.parallel.rendezvous import Peers, find_peers
from llmtrain.parallel.world import World

T = TypeVar("T")


class Ranks(ABC):
    """The ranks of a run, as one process sees them."""

    @abstractmethod
    def run(self, train: Callable[[World], T]) -> T:
        """Call `train` with each rank of this process. Return the result of the first rank."""

    @abstractmethod
    def find_peers(self, memory: Callable[[World], float]) -> Peers:
        """Meet the other processes, and return the information that each has sent. `memory` returns the bytes that a
        process may use. If it raises a UserError in one process, all processes raise a RecipeError."""

    @abstractmethod
    def open_mesh(self, world: World, peers: Peers, shards: int) -> AbstractContextManager[Mesh]:
        """Provide the mesh as the rank `world` sees it. `peers` is the result of `find_peers`, and `shards` the number of
        ranks of each replica. A collective of all ranks."""


class Processes(Ranks):
    """The ranks of a run in which every rank is a process."""

    def __init__(self, world: World, parallel: ParallelSection, timeout_seconds: float, common: Mapping[str, str]):
        """Prepare this process, which is the rank `world`. Every wait for other ranks fails after `timeout_seconds`.
        All ranks must have the same `common` values."""
        self.world, self.parallel, self.timeout_seconds, self.common = world, parallel, timeout_seconds, common

    def run(self, train: Callable[[World], T]) -> T:
        """Call `train` with this process's rank, and return its result."""
        return train(self.world)

    def find_peers(self, memory: Callable[[World], float]) -> Peers:
        """Connect to the other processes, as `rendezvous.find_peers` does."""
        return find_peers(self.world, self.parallel, lambda: memory(self.world), self.timeout_seconds, self.common)

    def open_mesh(self, world: World, peers: Peers, shards: int) -> AbstractContextManager[Mesh]:
        """Provide the mesh of all processes, as `open_process_mesh` does."""
        return open_process_mesh(
            world,
            replicas=world.size // shards,
            shards=shards,
            replica_backend=replica_backend(self.parallel),
            timeout_seconds=self.timeout_seconds,
            peers=peers,
            connections=self.parallel.connections,
        )


def replica_backend(parallel: ParallelSection) -> str:
    """Return the backend for traffic between replicas. With `zero_offload`, "auto" becomes gloo, because the master weights
    are sent from CPU memory."""
    return "gloo" if parallel.zero_offload and parallel.replica_backend == "auto" else parallel.replica_backend
