"""Check that the ranks reach one another over their network interfaces, with plain TCP connections before gloo
connects.

gloo's own attempt takes several times the timeout and names no rank.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack

from llmtrain.errors import TrainingError
from llmtrain.parallel.network import GLOO, Networks, address_of, is_loopback
from llmtrain.parallel.rendezvous import Rendezvous, gather_over_store
from llmtrain.parallel.world import World

PATIENCE_SECONDS = 10.0
"""Time limit for one connection."""
Endpoint = tuple[str, str, int]
"""Interface, its IPv4 address, and the port on which the rank listens."""


def check_connectivity(peers: Rendezvous, world: World, replicas: int, shard: int, timeout_seconds: float) -> None:
    """Raise TrainingError on every rank if any rank is gone or does not reach a peer on another node.

    Each rank tries its peers along both axes of the mesh, over interfaces that have an address.
    """
    if peers.store is None:
        return
    replica, rank_in_shard = divmod(world.rank, shard)
    axes = {
        "replica": [other * shard + rank_in_shard for other in range(replicas)],
        "shard": [replica * shard + other for other in range(shard)],
    }
    with ExitStack() as stack:
        cards = {axis: _listen(card, len(axes[axis]), stack) for axis, card in _endpoints(peers.networks).items()}
        told = gather_over_store(peers.store, world, "before groups are made", cards, timeout_seconds)
        if len(set(peers.nodes)) == 1:
            return
        failures = (
            _failure(
                peers, world.rank, peer, axis, cards[axis], told[peer][axis], min(timeout_seconds, PATIENCE_SECONDS)
            )
            for axis, members in axes.items()
            for peer in members
            if cards[axis] and told[peer][axis] and peers.nodes[peer] != peers.nodes[world.rank]
        )
        failure = next((found for found in failures if found), None)
        failed = [found for found in gather_over_store(peers.store, world, "reach", failure, timeout_seconds) if found]
    if failed:
        others = f"; nor do {len(failed) - 1} other ranks reach theirs" if len(failed) > 1 else ""
        raise TrainingError(f"{failed[0]}{others}")


def _endpoints(networks: Networks) -> dict[str, str | None]:
    given = os.environ.get(GLOO, "").partition(",")[0] or None
    return {"replica": networks.replica or given, "shard": networks.shard or given}


def _listen(interface: str | None, peers: int, stack: ExitStack) -> Endpoint | None:
    """Listen on the interface until `stack` closes. The kernel's queue alone accepts the connections. Return None if
    the interface has no address or the axis has a single rank."""
    address = interface and address_of(interface)
    if not address or peers == 1:
        return None
    listener = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    listener.bind((address, 0))
    listener.listen(peers)
    return interface, address, listener.getsockname()[1]


def _failure(
    peers: Rendezvous, rank: int, peer: int, axis: str, mine: Endpoint, theirs: Sequence, patience: float
) -> str | None:
    """Return why `rank` does not reach `peer`, or None if it does."""
    reason, same_machine = None, peers.ranks[rank].host == peers.ranks[peer].host
    if is_loopback(mine[1]) and not same_machine:
        reason = "loopback leads to no other host"
    else:
        try:
            socket.create_connection((theirs[1], theirs[2]), patience, source_address=(mine[1], 0)).close()
        except OSError as error:
            reason = str(error)
    return reason and (
        f"rank {rank} on {peers.ranks[rank].host} ({mine[0]}, {mine[1]}) does not reach rank {peer} on "
        f"{peers.ranks[peer].host} ({theirs[0]}, {theirs[1]}): {reason}; give parallel.{axis}_network a card "
        f"that reaches all hosts, or open what lies between them"
    )
