"""Rendezvous of ranks: a store that all ranks reach, a roll call that names the missing ranks, and a check that ranks
can connect to each other.

Every wait ends within `run.timeout_seconds` plus the roll call's GRACE_SECONDS.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from llmtrain.config import ParallelSection
from llmtrain.consistency import digest_of_values, inconsistency
from llmtrain.errors import RecipeError, TrainingError, UserError, first_line
from llmtrain.parallel.network import (
    Networks,
    address_of,
    address_towards,
    format_port_range,
    given_interface,
    is_loopback,
    listen_at_both_ends,
    network_stack,
)
from llmtrain.parallel.public_network import NodeAddress, find_unencrypted
from llmtrain.parallel.roll_call import format_ranks, gather_over_store, open_roll_call
from llmtrain.parallel.world import World, master_endpoint, node_name, ranks_per_device, slurm_step
from llmtrain.waiting import announced

ATTEMPT_SECONDS = 10.0
"""Maximum seconds for one connection attempt."""


@dataclass(frozen=True)
class RankInfo:
    """Information that a rank sends to the others before any process group is created."""

    node: str
    """Name of the rank's node; see `world.node_name`."""
    host: str
    address: str | None
    """IPv4 address from which the rank reaches rank 0, or None if it has no route."""
    memory: float
    """Bytes of the device's memory that this rank may use."""
    refusal: str | None = None
    """Why the rank cannot run this recipe, or None."""
    on_gpu: bool = False
    network: str = ""
    """Identifier of the rank's network interfaces; see `network.network_stack`."""
    ranks_per_gpu: int = 1
    """Number of ranks that compute on the rank's GPU. It may differ between hosts, and all ranks must know the largest."""
    digest: str = ""
    """Digest of the values that all ranks must have in common."""
    local_size: int = 1
    """Number of ranks on the rank's node, according to its environment."""


@dataclass(frozen=True)
class Peers:
    """Ranks of the job that have found one another: their store, each rank's information, and this host's interfaces."""

    store: dist.Store | None
    """The job's key-value store; None for a single process."""
    ranks: Sequence[RankInfo]
    """Information on each rank, by rank."""
    networks: Networks
    """Interfaces of this host that process groups use: those that the recipe names, or else the one that reaches the
    other hosts."""
    recipe_networks: Networks = field(default_factory=Networks)
    """Interfaces that the recipe itself names."""

    @property
    def nodes(self) -> list[str]:
        """Node of each rank."""
        return [rank_info.node for rank_info in self.ranks]


def find_peers(
    world: World,
    parallel: ParallelSection,
    memory: Callable[[], float],
    timeout_seconds: float,
    common: Mapping[str, str] | None = None,
) -> Peers:
    """Connect to the job's store and exchange `RankInfo` with all other ranks. `memory()` returns the bytes that this
    rank may use, or raises a UserError if it cannot run the recipe.

    Raises a TrainingError that names the missing ranks, or the ranks without a usable GPU if others have one.
    Raises RecipeError on every rank if any rank cannot run the recipe or has wrong variables, or if ranks differ in a value of
    `common`.
    """
    host = socket.gethostname()
    given, available, sharing = Networks(), 0.0, 1  # what a rank that refuses the recipe reports
    refusal: str | None = None
    on_gpu = torch.cuda.is_available()
    try:
        given, available = Networks.from_recipe(parallel), memory()
        sharing = ranks_per_device(world) if on_gpu else 1
    except UserError as error:
        if world.size == 1:
            raise
        refusal = str(error)
    if world.size == 1:
        return Peers(None, [RankInfo(node_name(), host, None, available)], given, given)
    deadline = time.monotonic() + timeout_seconds
    address, port = master_endpoint()
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=port)  # for libraries; Slurm may not have set them
    store = _open_store(world, address, port, timeout_seconds)
    common = common or {}
    mine = RankInfo(
        node=node_name(),
        host=host,
        address=address_towards(address),
        memory=available,
        refusal=refusal,
        on_gpu=on_gpu,
        network=network_stack(),
        ranks_per_gpu=sharing,
        digest=digest_of_values(common),
        local_size=world.local_size,
    )
    store, told = open_roll_call(store, world, asdict(mine), deadline - time.monotonic())
    if len({rank_info.get("digest") for rank_info in told}) > 1:  # first, because other versions have other fields
        values = gather_over_store(store, world, "to compare recipes", dict(common), deadline - time.monotonic())
        _refuse_inconsistency(values, [rank_info["host"] for rank_info in told])
    ranks = [RankInfo(**rank_info) for rank_info in told]
    _check_local_sizes(ranks)  # first, because ranks with a wrong count may refuse the recipe for that reason
    for rank, rank_info in enumerate(ranks):
        if rank_info.refusal:
            raise RecipeError(f"{rank_info.refusal} (rank {rank} on {rank_info.host})")
    _check_devices(ranks)
    networks = given
    elsewhere = [rank_info.address for rank_info in ranks if rank_info.node != mine.node]
    if elsewhere:
        reachable = (other for other in elsewhere if other is not None and not is_loopback(other))
        networks = given.with_default_route(*reachable, address)  # rank 0's address last, in case no other is known
    return Peers(store, ranks, networks, given)


def _refuse_inconsistency(values: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> None:
    def name(ranks: list[int]) -> str:
        return f"{format_ranks(ranks)} on {', '.join(dict.fromkeys(hosts[rank] for rank in ranks))}"

    raise RecipeError(
        f"ranks have different recipes or versions: {inconsistency(values, name)}; start the same command, recipe files and "
        "version of llmtrain on all hosts"
    )


def _check_local_sizes(ranks: Sequence[RankInfo]) -> None:
    """Raise RecipeError if a rank's environment counts more ranks on its node than the node has.

    Without LOCAL_WORLD_SIZE, all ranks count as ranks of one node. Work that the ranks of a node divide among
    themselves, such as the check of token shards, would then be left in part to ranks on other nodes.
    """
    on_node = Counter(rank_info.node for rank_info in ranks)
    for rank, rank_info in enumerate(ranks):
        there = on_node[rank_info.node]
        if rank_info.local_size > there:
            raise RecipeError(
                f"rank {rank} on {rank_info.host} counts {rank_info.local_size} ranks on its host, where {there} of {len(ranks)} are; "
                "give each rank LOCAL_RANK and LOCAL_WORLD_SIZE, the number of ranks on its host, or start with llmtrain launch, "
                "torchrun or srun, which do"
            )


def _check_devices(ranks: Sequence[RankInfo]) -> None:
    """Raise TrainingError if some ranks have a usable GPU and others have none.

    If the driver fails on one node, its ranks would otherwise train on the CPU, and the other ranks would wait for them in
    vain.
    """
    without = [rank for rank, rank_info in enumerate(ranks) if not rank_info.on_gpu]
    if 0 < len(without) < len(ranks):
        hosts = ", ".join(sorted({ranks[rank].host for rank in without}))
        raise TrainingError(  # not RecipeError: the next attempt may find the GPU
            f"{format_ranks(without)} on {hosts} found no usable GPU, the others did; see `nvidia-smi` and `llmtrain "
            "doctor` there, or set CUDA_VISIBLE_DEVICES= everywhere to train on CPUs"
        )


def job_prefix(world: World) -> str:
    """Return a prefix of the store's keys that separates this job from others that use the same store.

    The prefix contains the Slurm step only if Slurm numbers the ranks, because only then are all ranks in one step.
    """
    step = "" if "RANK" in os.environ else slurm_step()
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{step}/{world.size}"


def _open_store(world: World, address: str, port: str, timeout_seconds: float) -> dist.Store:
    """Return the job's store, hosted by torchrun's agent if there is one and by rank 0 otherwise. Rank 0 does not
    wait for the others to connect."""
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    leads = world.rank == 0 and not by_agent
    speaks = nullcontext() if leads or world.local_rank else announced(f"rank 0 at {address}:{port}", timeout_seconds)
    try:
        with speaks:
            store = dist.TCPStore(
                address,
                int(port),
                is_master=leads,
                timeout=timedelta(seconds=timeout_seconds),
                wait_for_workers=False,
                multi_tenant=True,
            )
        return dist.PrefixStore(job_prefix(world), store)
    except (dist.DistError, ValueError) as error:
        who = f"rank {world.rank} of {world.size} on {socket.gethostname()}"
        if leads:
            raise TrainingError(
                f"{who} can't listen at {address}:{port}, where ranks meet: {first_line(error)}; MASTER_ADDR must be an "
                "address of this host, and MASTER_PORT a port that is free here"
            ) from error
        raise TrainingError(
            f"{who} could not reach rank 0, where ranks meet, at {address}:{port} within {timeout_seconds:.0f} s: "
            f"{first_line(error)}; check MASTER_ADDR and MASTER_PORT, that rank 0 was started, and that no firewall is between the hosts"
        ) from error


class Endpoint(NamedTuple):
    """Address and ports at which a rank accepts connections on one of its interfaces."""

    interface: str
    address: str
    """IPv4 address of the interface."""
    ports: Sequence[int]
    port_range: str
    """Range from which the rank's host takes such ports, as text for users."""


def check_connectivity(peers: Peers, world: World, replicas: int, shards: int, timeout_seconds: float) -> str | None:
    """Raise TrainingError on every rank if any rank is gone or does not reach a peer on another node. Otherwise return a
    line that says which messages cross a public network unencrypted, or None.

    Each rank connects to its peers along both axes of the mesh, over interfaces that have an address.
    """
    if peers.store is None:
        return None
    replica, rank_in_shard = divmod(world.rank, shards)
    axes = {
        "replica": [other * shards + rank_in_shard for other in range(replicas)],
        "shard": [replica * shards + other for other in range(shards)],
    }
    with ExitStack() as stack:
        interfaces = _interface_by_axis(peers.networks)
        mine = {axis: _listen(interfaces[axis], len(members), stack) for axis, members in axes.items()}
        told = gather_over_store(peers.store, world, "after the preparation of data", mine, timeout_seconds)
        if len(set(peers.nodes)) == 1:
            return None
        # The store holds JSON, which turns an endpoint into a list.
        of_ranks = [{axis: found and Endpoint(*found) for axis, found in by_axis.items()} for by_axis in told]
        patience = min(timeout_seconds, ATTEMPT_SECONDS)
        failures = (
            _failure(peers, world.rank, peer, axis, mine[axis], of_ranks[peer][axis], patience)
            for axis, members in axes.items()
            for peer in members
            if mine[axis] and of_ranks[peer][axis] and peers.nodes[peer] != peers.nodes[world.rank]
        )
        failure = next((found for found in failures if found), None)
        # A rank whose connections all succeed arrives at once; one with a failure arrives up to `patience` later.
        told_failures = gather_over_store(peers.store, world, "reach", failure, timeout_seconds + patience)
    failed = [found for found in told_failures if found]
    if failed:
        others = f"; {len(failed) - 1} more rank{'s' * (len(failed) > 2)} can't reach a peer" if len(failed) > 1 else ""
        raise TrainingError(f"{failed[0]}{others}")
    for axis in axes:
        endpoints = [by_axis[axis] for by_axis in of_ranks]
        addresses = [
            endpoint and NodeAddress(rank_info.node, rank_info.host, endpoint.interface, endpoint.address)
            for rank_info, endpoint in zip(peers.ranks, endpoints, strict=True)
        ]
        if (unencrypted := find_unencrypted(addresses)) is not None:
            return unencrypted
    return None


def _interface_by_axis(networks: Networks) -> dict[str, str | None]:
    given = given_interface()
    return {"replica": networks.replica or given, "shard": networks.shard or given}


def _listen(interface: str | None, peers: int, stack: ExitStack) -> Endpoint | None:
    """Listen on the interface until `stack` closes, and return the endpoint. Connections complete in the kernel's queue
    and are never accepted. Return None if the interface has no address or the axis has a single rank."""
    address = interface and address_of(interface)
    if not address or peers == 1:
        return None
    listeners = [stack.enter_context(listener) for listener in listen_at_both_ends(address, peers)]
    return Endpoint(interface, address, [listener.getsockname()[1] for listener in listeners], format_port_range())


def _failure(
    peers: Peers, rank: int, peer: int, axis: str, mine: Endpoint, theirs: Endpoint, patience: float
) -> str | None:
    """Return why `rank` does not reach `peer`, or None if it does."""
    me, other = peers.ranks[rank], peers.ranks[peer]
    share_interfaces = me.network == other.network
    reason = None
    if is_loopback(mine.address) and not (share_interfaces and me.host == other.host):
        reason = "loopback leads to no other host"
    elif mine.address == theirs.address and not share_interfaces:  # a connection would reach this host itself
        reason = "both hosts have the same address, as in containers or behind NAT"
    else:
        for port in theirs.ports:
            try:
                socket.create_connection((theirs.address, port), patience, source_address=(mine.address, 0)).close()
            except OSError as error:
                reason = f"port {port}: {error}"
                break
    if reason is None:
        return None
    return (
        f"rank {rank} on {me.host} ({mine.interface}, {mine.address}) does not reach rank {peer} on {other.host} "
        f"({theirs.interface}, {theirs.address}): {reason}; set parallel.{axis}_network to an interface that reaches all hosts, open "
        f"TCP ports {theirs.port_range} of {other.host}, or join the hosts by a VPN (launch/two_sites.md)"
    )
