"""Tests of ranks on threads: they give the same bits, bytes and errors as gloo, and show mistakes that gloo hides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from llmtrain.errors import TrainingError
from llmtrain.parallel.comms import Comms, is_lost_peer
from llmtrain.parallel.wire_format import WireFormat
from tests.distributed import threads as module
from tests.distributed.fake_engine import Scenario, edit
from tests.distributed.oracle_wire import rounded_sum
from tests.distributed.pool import RankPool
from tests.distributed.test_gloo_scenarios import simulate_on_gloo
from tests.distributed.threads import FreeThreads, ThreadComms, Threads, on_each, simulate
from tests.distributed.trace import assert_same_bits
from tests.unit.test_wire import KINDS

SIZES = [0, 1, 2, 3, 127, 129, 513, 5003]
DTYPES = [torch.float64, torch.float32, torch.int64]


def message(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    values = np.random.default_rng([rank, size]).normal(size=size)
    return torch.from_numpy(values * (1000 if dtype == torch.int64 else 1)).to(dtype)


def use_all(comms: Comms) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Run every kind of collective, many in flight at once, and return their results and bytes by name."""
    pending, sent, results = {}, {}, {}

    def begin(name: str, start: Callable[[], Any]) -> None:
        before = comms.traffic.bytes
        pending[name] = start()
        sent[name] = comms.traffic.bytes - before

    for size in SIZES:
        for dtype in DTYPES:
            mine = message(comms.rank, size, dtype)
            begin(f"sum of {size} {dtype}", lambda mine=mine: comms.start_all_reduce(mine.clone(), "sum"))
            begin(f"all of {size} {dtype}", lambda mine=mine: comms.start_all_gather(mine, "all"))
        for kind in KINDS:
            mine = message(comms.rank, size, torch.float64)
            begin(
                f"{kind} of {size}",
                lambda mine=mine, kind=kind: comms.start_all_reduce(mine, kind, WireFormat(kind), True),
            )
    for reduction in reversed(pending.values()):
        reduction.start_second_phase()
    for name, reduction in pending.items():
        before = comms.traffic.bytes
        results[name] = reduction.wait().clone()
        if name.split()[0] in KINDS and not name.endswith(" 0"):
            results[f"{name}, lost"] = reduction.quantization_error()
        sent[name] += comms.traffic.bytes - before
        assert reduction.is_done
    return results, sent


def on_gloo(fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn` with comms over gloo, on a rank of a pool."""
    return fn(Comms(dist.group.WORLD), *args)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gloo_brings_the_same(ranks: RankPool, world: int) -> None:
    """Bits are the same except in sums of three or more floats, which gloo does not add in rank order. In any order, a
    sum is off by at most (n - 1) u / (1 - (n - 1) u) of the sum of magnitudes, with u = eps / 2 (Higham, Accuracy and
    Stability, 4.2)."""
    both = zip(on_each(world, use_all), ranks.run(on_gloo, use_all, world_size=world), strict=True)
    for (ours, our_bytes), (theirs, their_bytes) in both:
        assert our_bytes == their_bytes
        assert ours.keys() == theirs.keys()
        for name, got in ours.items():
            expected = theirs[name]
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
            if name.startswith("sum") and world > 2 and got.is_floating_point():
                magnitudes = sum(message(rank, len(got), got.dtype).double().abs() for rank in range(world))
                unit = (world - 1) * torch.finfo(got.dtype).eps / 2
                bound = 2 * unit / (1 - unit) * magnitudes
                assert ((got.double() - expected.double()).abs() <= bound).all(), name
            else:
                assert torch.equal(got, expected), name


def test_a_run_of_two_replicas_has_the_bits_of_gloos(ranks: RankPool) -> None:
    penalty = {"z": 1.5, "temperature": 0.3, "clip": 0.5}
    for wire in ("fp32", {"kind": "int8", "error_feedback": True}):
        scenario = Scenario(edit(penalty=penalty, wire=wire), 2, 2, steps=16, resume_after=9)
        (expected,) = simulate_on_gloo(ranks, [scenario])
        got = simulate(scenario)
        assert_same_bits(got, expected)
        assert got.squares == expected.squares
        assert got.bytes_sent == expected.bytes_sent


def without_peer(comms: Comms, exchanges: int) -> tuple[str, bool]:
    """Let rank 1 leave after `exchanges` of the two exchanges of a rounded sum. Return the other rank's (error, whether
    the backend's error that caused it counts as a lost peer). The collectives of a real engine end with the backend's
    error itself."""
    if comms.rank == 1:
        if exchanges:
            sent = WireFormat("int8").encode(torch.ones(2, 256))
            comms.open_exchange("the message", sent.shape[1]).send_parts(sent).wait()
        return "", False
    try:
        comms.all_reduce(torch.ones(300), "the message", WireFormat("int8"))
    except TrainingError as error:
        return str(error), is_lost_peer(error.__cause__)
    return "summed without rank 1", False


@pytest.mark.parametrize("exchanges", [0, 1])
def test_a_peer_that_leaves_is_an_error_that_names_the_message(ranks: RankPool, exchanges: int) -> None:
    (said, is_lost), _ = ranks.run(on_gloo, without_peer, exchanges, world_size=2, timeout=20)
    assert said.startswith("the message over the replica axis failed on rank 0 (replica 0 of 2) on ")
    assert is_lost
    (said, _), _ = on_each(2, without_peer, exchanges)
    assert said.startswith("the message over the replica axis failed on replica 0: ")
    assert said.endswith(
        "no rank can go on: rank 0 waits for 'the message' among ranks [0, 1], begun by [0]; rank 1 has ended"
    )


def in_halves(comms: Comms, size: int) -> tuple[int, torch.Tensor]:
    """Make groups of ranks 0 and 2 and of ranks 1 and 3, as with two shards. Return this rank's place in its group, and
    the group's sum with an int8 wire."""
    mine = comms.among([[0, 2], [1, 3]], comms.rank, "half", 20)
    return mine.rank, mine.all_reduce(message(comms.rank, size, torch.float64), "test", WireFormat("int8"))


def test_a_group_of_some_ranks_sums_its_own(ranks: RankPool) -> None:
    messages = np.stack([message(rank, 700, torch.float64).numpy() for rank in range(4)])
    for rank, answers in enumerate(zip(on_each(4, in_halves, 700), ranks.run(on_gloo, in_halves, 700), strict=True)):
        total, _ = rounded_sum(messages[rank % 2 :: 2], "int8")
        for place, got in answers:
            assert place == rank // 2
            np.testing.assert_array_equal(got.numpy(), total)


def test_a_result_is_written_when_it_is_waited_for() -> None:
    """Until then, its place holds NaN, even if all ranks have sent."""

    def look(comms: Comms) -> list[torch.Tensor]:
        first = comms.start_all_reduce(torch.ones(3), "first")
        comms.all_reduce(torch.ones(3), "second")
        assert first.is_done
        before = first.result.clone()
        return [before, first.wait().clone(), first.wait()]

    for before, after, again in on_each(2, look):
        assert before.isnan().all()
        assert after.tolist() == again.tolist() == [2.0] * 3


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            lambda comms: comms.start_all_reduce(torch.ones(3), "a"),
            lambda comms: comms.start_all_reduce(torch.ones(3), "b"),
        ),
        (
            lambda comms: comms.start_all_reduce(torch.ones(3), "a"),
            lambda comms: comms.start_all_gather(torch.ones(3), "a"),
        ),
        (
            lambda comms: comms.start_all_gather(torch.ones(3), "a"),
            lambda comms: comms.start_all_gather(torch.ones(4), "a"),
        ),
        (
            lambda comms: comms.start_all_gather(torch.ones(3), "a"),
            lambda comms: comms.start_all_gather(torch.ones(3).double(), "a"),
        ),
    ],
    ids=["messages", "kinds", "sizes", "types"],
)
def test_ranks_that_differ_in_their_collectives_end_at_once(ours: Callable, theirs: Callable) -> None:
    with pytest.raises(
        AssertionError, match=r"ranks differ in their collectives: rank 1 began \('.', .*, rank 0 \('.', "
    ):
        on_each(3, lambda comms: (theirs if comms.rank == 1 else ours)(comms).wait())


def test_a_rank_that_raises_ends_the_others_and_is_the_one_that_is_heard() -> None:
    ended: list[str] = []

    def fail(comms: Comms) -> None:
        if comms.rank == 2:
            raise ValueError("its own fault")
        try:
            comms.all_reduce(torch.ones(1), "what never comes")
        except TrainingError as error:
            ended.append(str(error))
            raise

    with pytest.raises(ValueError, match="its own fault") as raised:
        on_each(3, fail)
    assert raised.value.__notes__ == ["on rank 2"]
    assert len(ended) == 2
    assert all("what never comes" in said and "rank 2 raised ValueError: its own fault" in said for said in ended)


def test_ranks_that_wait_for_each_other_say_for_what() -> None:
    threads = Threads(4)

    def cross(rank: int) -> None:
        replica, shard = threads.axes(rank, 2, 2)
        for comms in (replica, shard) if rank in (0, 3) else (shard, replica):
            comms.all_reduce(torch.ones(1), f"along {comms.axis}")

    with pytest.raises(TrainingError, match="no rank can go on") as raised:
        threads.run(cross)
    for rank, (axis, peers) in enumerate(
        [("replica", [0, 2]), ("shard", [0, 1]), ("shard", [2, 3]), ("replica", [1, 3])]
    ):
        assert f"rank {rank} waits for 'along {axis}' among ranks {peers}, begun by [{rank}]" in str(raised.value)


def test_free_ranks_wait_no_longer_than_their_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    threads = FreeThreads(2)

    def wait_in_vain(rank: int) -> None:
        if rank == 0:
            ThreadComms(threads, [0, 1], 0).all_reduce(torch.ones(1), "what never comes")

    with pytest.raises(TrainingError, match="waited 0 s in vain for 'what never comes'"):
        threads.run(wait_in_vain)


def test_free_ranks_end_when_one_has_raised() -> None:
    threads = FreeThreads(2)

    def fail(rank: int) -> None:
        if rank == 1:
            raise ValueError("its own fault")
        ThreadComms(threads, [0, 1], 0).all_reduce(torch.ones(1), "what never comes")

    with pytest.raises(ValueError, match="its own fault"):
        threads.run(fail)


def test_a_run_is_the_same_every_time() -> None:
    """Ranks take turns in a fixed order, so a test that fails once fails again."""

    def order() -> list[int]:
        seen: list[int] = []
        threads = Threads(4)

        def take_turns(rank: int) -> None:
            replica, shard = threads.axes(rank, 2, 2)
            for comms in (replica, shard, shard, replica):
                seen.append(rank)
                comms.all_reduce(torch.ones(1), "turn")

        threads.run(take_turns)
        return seen

    assert order() == order()
