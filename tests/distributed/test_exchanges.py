"""Tests of exchanges over gloo. They are messages between two ranks, and a rank is ready to receive all before it sends one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from llmtrain import trace
from llmtrain.errors import TrainingError
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.sparse_format import SparseFormat
from llmtrain.parallel.wire_format import WireFormat
from tests.distributed.pool import RankPool

FORMATS = {"int8": WireFormat("int8"), "topk": SparseFormat(64, "2bit")}


def _messages_of_a_sum(wire: str) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """Return the names of the operations that a rank begins in one sum, that sum, and the same sum by the backend's collectives."""
    comms, begun = Comms(dist.group.WORLD), []
    message = torch.randn(5000, generator=torch.Generator().manual_seed(comms.rank))

    def noted(name: str, begin: Callable) -> Callable:
        return lambda *given, **options: (begun.append(name), begin(*given, **options))[1]

    with pytest.MonkeyPatch.context() as patched:
        for name in ("irecv", "isend"):
            patched.setattr(dist, name, noted(name, getattr(dist, name)))
        ours = comms.all_reduce(message.clone(), wire=FORMATS[wire])
    with_collectives = Comms(dist.group.WORLD)
    with_collectives.is_gloo = False
    return begun, ours, with_collectives.all_reduce(message.clone(), wire=FORMATS[wire])


@pytest.mark.parametrize("wire", FORMATS)
def test_over_gloo_a_rank_is_ready_for_all_parts_before_it_sends_one(ranks: RankPool, wire: str) -> None:
    receives, sends = ["irecv"] * 2, ["isend"] * 2
    exchanges = receives * 2 + sends * 2 if wire == "int8" else receives + sends
    for begun, ours, same in ranks.run(_messages_of_a_sum, wire, world_size=3):
        assert begun == exchanges
        assert torch.equal(ours, same) and ours.any()


def _sum_without_a_peer(timeout: str) -> str:
    comms = Comms(dist.new_group(backend="gloo", timeout=timedelta(seconds=20)))
    if comms.rank == 1:
        return ""
    with pytest.raises(TrainingError) as late:
        comms.all_reduce(torch.ones(300), timeout, FORMATS["int8"])
    return str(late.value)


def test_an_exchange_with_a_peer_that_is_late_fails_in_its_own_words(ranks: RankPool) -> None:
    said, _ = ranks.run(_sum_without_a_peer, "synchronizing block 3", world_size=2)
    assert said.startswith("synchronizing block 3 over the replica axis failed on rank 0")
    assert "timeout" in said and said.endswith("a peer died or took longer than run.timeout_seconds")


def _traced_sums() -> tuple[bool, list[str], int]:
    """Return whether sums are equal with and without a trace, the names of the traced messages, and the number that arrived."""
    comms, arrived, names = Comms(dist.group.WORLD), [], []

    def message(name: str, sent: float, in_stream: bool) -> Callable[[], None]:
        names.append(name)
        return lambda: arrived.append(name)

    values = torch.randn(1000, generator=torch.Generator().manual_seed(comms.rank))
    plain = comms.all_reduce(values.clone(), "a sum", FORMATS["int8"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trace, "message", message)
        traced = comms.all_reduce(values.clone(), "a sum", FORMATS["int8"])
    return torch.equal(plain, traced), names, len(arrived)


def test_a_trace_knows_when_messages_have_arrived(ranks: RankPool) -> None:
    assert ranks.run(_traced_sums, world_size=2) == [(True, ["a sum"] * 2, 2)] * 2


def _sums_after_one_that_was_given_up() -> bool:
    """Return whether a second communicator of a group sums correctly after the first one has left an exchange unfinished."""
    given_up = Comms(dist.group.WORLD).start_all_reduce(torch.ones(300), "given up", FORMATS["int8"])
    total = Comms(dist.group.WORLD).all_reduce(torch.full((300,), 2.0), "a sum", FORMATS["int8"])
    return given_up is not None and torch.equal(total, torch.full((300,), 4.0))


def test_receives_of_an_exchange_that_was_given_up_match_no_later_message(ranks: RankPool) -> None:
    assert ranks.run(_sums_after_one_that_was_given_up, world_size=2, timeout=20) == [True] * 2
