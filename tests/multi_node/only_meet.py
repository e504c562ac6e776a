"""One rank of a start on several hosts, without a model: it meets the other ranks, prints its place in the mesh and ends."""

from __future__ import annotations

from llmtrain.config import ParallelSection
from llmtrain.errors import BAD_USAGE, FAILED, TrainingError, UserError
from llmtrain.parallel.mesh import open_process_mesh
from llmtrain.parallel.rendezvous import find_peers
from llmtrain.parallel.world import World


def main(timeout: str, replica_network: str | None = None) -> int:
    """Start as a run with this `run.timeout_seconds` and `parallel.replica_network` does, and return the exit code."""
    world = World.from_environment()
    try:
        peers = find_peers(world, ParallelSection(replica_network=replica_network), lambda: 0.0, float(timeout))
        with open_process_mesh(
            world,
            replicas=world.size,
            shards=1,
            replica_backend="auto",
            timeout_seconds=float(timeout),
            peers=peers,
        ) as mesh:
            print(f"replica {mesh.replica_comms.rank} of {mesh.replicas} over {mesh.replica_comms.interface}")
    except (TrainingError, UserError) as error:
        print(f"error: {error}")
        return BAD_USAGE if isinstance(error, UserError) else FAILED
    return 0
