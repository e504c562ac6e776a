"""Tests of several connections between replicas. The longest round trip determines their number, which does not change results."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import pytest
import torch
import torch.distributed as dist

from llmtrain.parallel import comms as comms_module
from llmtrain.parallel import connections
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.connections import FAR_SECONDS, SEVERAL, connections_for, longest_round_trip
from llmtrain.parallel.mesh import build_mesh
from llmtrain.parallel.wire_format import WireFormat
from llmtrain.parallel.world import World
from tests.distributed.pool import RankPool

FORMATS = {"as they are": None, "int8": WireFormat("int8")}


def test_only_replicas_that_are_far_apart_have_several() -> None:
    assert connections_for(0.0) == connections_for(0.99 * FAR_SECONDS) == 1
    assert connections_for(FAR_SECONDS) == SEVERAL > 1


def _groups_of_meshes(far: float) -> list[int]:
    """Return the lengths of `groups` between two replicas of two ranks: for 1, 2 and automatic connections on two hosts, and for
    automatic ones on one host."""

    def groups(asked: int | Literal["auto"], hosts: int = 2) -> int:
        world = World(dist.get_rank(), 4, dist.get_rank() % (4 // hosts), 4 // hosts)
        mesh = build_mesh(
            world,
            torch.device("cpu"),
            replicas=2,
            shards=2,
            replica_backend="gloo",
            timeout=timedelta(seconds=60),
            connections=asked,
        )
        assert len(mesh.shard_comms.groups) == len(mesh.all_ranks.groups) == 1
        assert mesh.replica_comms.traffic.bytes == 0
        for group in mesh.replica_comms.groups:
            assert dist.get_process_group_ranks(group) == [world.rank % 2, world.rank % 2 + 2]
        return len(mesh.replica_comms.groups)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(connections, "FAR_SECONDS", far)
        return [*(groups(asked) for asked in (1, 2, "auto")), groups("auto", hosts=1)]


def test_a_mesh_has_as_many_as_asked_for_or_by_its_round_trips(ranks: RankPool) -> None:
    assert ranks.run(_groups_of_meshes, 0.0, world_size=4) == [[1, 2, SEVERAL, 1]] * 4
    assert ranks.run(_groups_of_meshes, 60.0, world_size=4) == [[1, 2, 1, 1]] * 4


def _round_trip_with_a_far_rank() -> float:
    """Return the longest round trip if the last rank hears from the others 20 ms late."""

    class Far(Comms):
        def start_all_to_all(self, *arguments):
            begun = super().start_all_to_all(*arguments)
            time.sleep(0.02 * (self.rank == self.size - 1))
            return begun

    return longest_round_trip(Far(dist.group.WORLD), Comms(dist.group.WORLD, axis="world"))


def test_ranks_agree_on_the_longest_round_trip(ranks: RankPool) -> None:
    found = ranks.run(_round_trip_with_a_far_rank, world_size=3)
    assert len(set(found)) == 1 and found[0] >= 0.02


def _sums(several: bool, wire: str) -> tuple[list[torch.Tensor], float, list[int]]:
    """Sum blocks of several sizes, all in flight at once. Return the sums, the bytes sent, and the group of each operation."""
    comms, used = Comms(dist.group.WORLD), []
    comms.add_groups([dist.new_group(backend="gloo") for _ in range(2)] if several else [])
    generator = torch.Generator().manual_seed(comms.rank)
    blocks = [torch.randn(size, generator=generator) for size in (5, 1031, 40_000, 7, 2048)]

    def noted(collective: Callable) -> Callable:
        def run(*given, group, **options):
            used.append(comms.groups.index(group))
            return collective(*given, group=group, **options)

        return run

    with pytest.MonkeyPatch.context() as patched:
        for name in ("all_reduce", "irecv", "isend"):
            patched.setattr(dist, name, noted(getattr(dist, name)))
        pending = [comms.start_all_reduce(block, wire=FORMATS[wire]) for block in blocks]
        for one in pending:
            one.start_second_phase()
        sums = [one.wait() for one in pending]
        comms.all_reduce(torch.zeros(1))
    return sums, comms.traffic.bytes, used


@pytest.mark.parametrize("wire", FORMATS)
def test_sums_have_the_same_bits_on_several_connections(ranks: RankPool, wire: str) -> None:
    for one, three in zip(*(ranks.run(_sums, several, wire, world_size=3) for several in (False, True)), strict=True):
        assert all(map(torch.equal, one[0], three[0])) and one[1] == three[1] > 0
        # When the last all-reduce starts, no message is in flight, so it uses the first group.
        exchanged = [0] * 5 * 2 * 4  # two exchanges of five blocks, each with two peers to receive from and to send to
        assert three[2] == ([0, 1, 2, 0, 1] if FORMATS[wire] is None else exchanged) + [0]
        assert one[2] == [0] * len(three[2])


def _large_sum(several: bool, parts_above: int) -> tuple[torch.Tensor, float, list[int]]:
    """Return the sum of one message, the bytes sent, and the number of values of each part.

    Check that parts take the connections in turn, and that three later messages do so again from the first one, because no message
    is in flight any more.
    """
    comms, sizes = Comms(dist.group.WORLD), []
    comms.add_groups([dist.new_group(backend="gloo") for _ in range(2)] if several else [])
    message = torch.randn(1000, generator=torch.Generator().manual_seed(comms.rank))
    start = dist.all_reduce

    def noted(tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool) -> dist.Work:
        assert group is comms.groups[len(sizes) % len(comms.groups)]
        sizes.append(tensor.numel())
        return start(tensor, group=group, async_op=async_op)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "all_reduce", noted)
        patched.setattr(comms_module, "HOP_BYTES", parts_above)
        pending = comms.start_all_reduce(message)
        total = pending.wait()
        assert total is message and pending.is_done
        parts, sent = list(sizes), comms.traffic.bytes
        sizes.clear()
        for later in [comms.start_all_reduce(torch.zeros(1)) for _ in range(3)]:
            later.wait()
    return total, sent, parts


def test_a_message_of_more_than_a_hop_is_sent_in_parts_on_all_connections(ranks: RankPool) -> None:
    whole = ranks.run(_large_sum, False, 100, world_size=2)
    # A hop is what one rank sends to the next one: half of the message if there are two ranks.
    for parts_above, sizes in ((1999, [334, 334, 332]), (2000, [1000])):
        for one, three in zip(whole, ranks.run(_large_sum, True, parts_above, world_size=2), strict=True):
            assert torch.equal(one[0], three[0]) and one[1] == three[1] == 4000
            assert one[2] == [1000] and three[2] == sizes
