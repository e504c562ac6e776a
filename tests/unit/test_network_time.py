"""Predicted time for which replicas wait for the network, compared with times computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest

from llmtrain.config import EverySecondsSection, SyncSection, WireSection
from llmtrain.config.sync import AnySchedule
from llmtrain.parallel.comms import Comms
from llmtrain.plan.network_time import (
    INITIAL_WINDOW,
    Exchange,
    NetworkLink,
    RoundTime,
    block_message,
    concurrent_seconds,
    gradient_time,
    round_time,
    sequence_seconds,
    slow_start_seconds,
    timed_round,
)
from llmtrain.sync.methods import METHODS
from llmtrain.sync.timed_period import TimedPeriod

BLOCKS = [1_024_000] * 6
WIRE = 2 * 3 / 4 * 4 * 1_024_000  # bytes of a block, from each of 4 ranks
FAST = NetworkLink(mbit=96.0)
BLOCK = 8 * WIRE / 96e6  # seconds of a block's message at 96 Mbit/s, about 0.5


def sync_of(method: str, **keys: object) -> SyncSection:
    return SyncSection.model_validate({"method": method, **METHODS[method].PRESET, "warmup_steps": 0, **keys})


def exposed(method: str, link: NetworkLink = FAST, every: int = 20, step: float = 0.6, **keys: object) -> float:
    found = round_time(sync_of(method, **keys), BLOCKS, 4, step, every, link)
    assert found.utilization == pytest.approx(found.compute / (found.compute + found.exposed))
    return found.exposed


def test_a_hop_is_halved_so_that_latency_passes_while_the_other_half_is_sent() -> None:
    link = NetworkLink(mbit=8.0, latency_seconds=0.05)  # 1 MB/s, round trips of 0.1 s
    assert Exchange(6e6, 6).seconds(link) == pytest.approx(6 * 1.0)
    assert Exchange(6e5, 6).seconds(link) == pytest.approx(6 * 0.15)
    assert Exchange(6e5, 1, is_ring=False).seconds(link) == pytest.approx(0.7), (
        "the receiver first says that it is ready"
    )
    assert Exchange(6e5, 1, is_ring=False, receivers_ready=True).seconds(link) == pytest.approx(0.65)
    assert Exchange(0.0, 3).seconds(link) == pytest.approx(0.3)


def test_gradients_after_backward_follow_each_other_with_few_in_flight() -> None:
    """Three blocks are sent at once, as under ZeRO, although the connections could carry eight."""
    link = NetworkLink(mbit=96.0, latency_seconds=0.1, slow_start=False, connections=4)
    small = [block // 10 for block in BLOCKS]
    found = gradient_time(WireSection(), small, 4, 0.6, link, backward_share=0.0)
    assert found.exposed == pytest.approx(2 * 6 * (BLOCK / 10 / 6 / 2 + 0.2))
    assert gradient_time(WireSection(), BLOCKS, 4, 0.6, FAST, backward_share=0.0).exposed == pytest.approx(6 * BLOCK)
    paused = gradient_time(WireSection(), small, 4, 0.6, replace(link, slow_start=True), backward_share=0.0)
    assert paused.exposed > found.exposed


def test_bytes_of_a_block_are_those_of_the_wire() -> None:
    assert block_message(1_024_000, 4, WireSection()).sent == pytest.approx(WIRE)
    assert block_message(1_024_000, 4, WireSection()).first.hops == 6
    assert block_message(128 * 1_000_000, 4, WireSection()).first.hops == pytest.approx(6 * 128e6 / (2 << 20))
    sizes = {"bf16": 2, "int8": 1 + 4 / 128, "int4": 0.5 + 4 / 128}
    for kind, size in sizes.items():
        message = block_message(1_024_000, 4, WireSection(kind=kind))
        assert message.sent == pytest.approx(2 * 3 / 4 * size * 1_024_000)
        assert replace(message.first, receivers_ready=True) == message.second and (
            message.first.hops,
            message.first.peers,
        ) == (1, 3)
        assert block_message(1_024_000, 4, WireSection(kind=kind), rounded=False).second is None


@pytest.mark.parametrize("method", ["synchronous", "diloco", "des_loc", "wagma", "a_edit"])
def test_values_of_8_bytes_take_as_long_as_twice_as_many(method: str) -> None:
    sync, wide = sync_of(method), [2 * values for values in BLOCKS]
    if sync.period.is_timed:
        assert timed_round(sync, BLOCKS, 4, 0.6, FAST, value_bytes=8) == timed_round(sync, wide, 4, 0.6, FAST)
    else:
        of_wide = round_time(sync, wide, 4, 0.6, 20, FAST)
        assert round_time(sync, BLOCKS, 4, 0.6, 20, FAST, value_bytes=8) == of_wide
    int8, topk = WireSection(kind="int8"), WireSection(kind="topk", values="fp32", error_feedback=True)
    assert block_message(8192, 4, int8, value_bytes=8) == block_message(8192, 4, int8)
    assert block_message(8192, 4, topk, value_bytes=8).sent == 3 * 2 * 64 * (8 + 1.5)


def test_two_messages_at_once_hide_latency_but_no_bytes() -> None:
    short, link = Exchange(100.0, 6), NetworkLink(mbit=1e6, latency_seconds=0.05)
    assert concurrent_seconds([], link) == 0
    assert concurrent_seconds([short], link) == pytest.approx(0.6) == concurrent_seconds([short] * 2, link)
    assert concurrent_seconds([short] * 3, link) == pytest.approx(1.2)
    assert concurrent_seconds([Exchange(WIRE, 6)] * 6, FAST) == pytest.approx(6 * BLOCK)


def test_second_exchanges_of_two_blocks_are_sent_at_once() -> None:
    """First exchanges take 0.1 s, second ones 0.05 s. The first exchanges of three blocks arrive together, and so do the
    second exchanges of two blocks."""
    link = NetworkLink(mbit=1e6, latency_seconds=0.05)
    rounded = block_message(128_000, 4, WireSection(kind="int8"))
    assert concurrent_seconds([rounded.first] * 6, link) == pytest.approx(0.1, rel=1e-3)
    for blocks, hops in enumerate([3, 3, 4, 6, 6, 7], 1):
        assert sequence_seconds([rounded] * blocks, link) == pytest.approx(hops * 0.05, rel=1e-3)
    assert sequence_seconds([rounded] * 6, link, in_flight=6) == pytest.approx(5 * 0.05, rel=1e-3)
    assert sequence_seconds([rounded] * 6, link, in_flight=1) == pytest.approx(18 * 0.05, rel=1e-3)
    slow = NetworkLink(mbit=1.0, latency_seconds=0.05)
    assert sequence_seconds([rounded] * 6, slow) == pytest.approx(8e-6 * 6 * rounded.sent + 0.1)
    assert concurrent_seconds([rounded.first] * 6, slow) == pytest.approx(8e-6 * 6 * rounded.first.sent + 0.1)


def test_blocking_waits_for_all_bytes_and_for_the_agreement() -> None:
    assert exposed("diloco") == pytest.approx(6 * BLOCK)
    assert exposed("diloco", NetworkLink(96.0, 0.01, slow_start=False)) == pytest.approx(3 * 0.02 + 6 * BLOCK)
    assert exposed("edit", schedule="blocking") == pytest.approx(6 * BLOCK)
    far = NetworkLink(1e6, 0.5, slow_start=False)  # 6 blocks on 2 threads, 6 hops each
    assert exposed("local_sgd", far) == pytest.approx(3 + 3 * 6, rel=1e-3)


def test_several_connections_have_more_messages_on_their_way() -> None:
    short, link = Exchange(100.0, 6), NetworkLink(mbit=1e6, latency_seconds=0.05, slow_start=False, connections=2)
    assert concurrent_seconds([short] * 4, link) == pytest.approx(0.6)
    assert concurrent_seconds([short] * 4, link, started=3) == pytest.approx(1.2)
    rounded = block_message(128_000, 4, WireSection(kind="int8"))  # on one connection, which carries any number of them
    assert concurrent_seconds([rounded.first] * 4, link) == pytest.approx(0.1, rel=1e-3)
    far = NetworkLink(1e6, 0.5, slow_start=False, connections=4)  # 6 blocks, 3 of them at once, 6 hops each
    assert exposed("local_sgd", far) == pytest.approx(3 + 2 * 6, rel=1e-3)
    assert exposed("synchronous", far) == pytest.approx(6, rel=1e-3)  # all of them at once
    # A step in groups of two, which have one connection each, and a step with all replicas.
    assert exposed("wagma", far, every=2) == pytest.approx(1.5 + 3 * 2 + 2 * 6, rel=1e-3)
    large = block_message(
        2**21, 2, WireSection(), connections=4
    ).first  # 4 MiB to the other rank in each direction, in 4 parts
    assert (large.parts, large.hops) == (4, 2) and large.sent == 4 * 2**21
    assert concurrent_seconds([large], far) == pytest.approx(2 * (large.sent / 16 * 8e-12 + 1.0), rel=1e-3)
    assert concurrent_seconds([large] * 3, far, started=1) == pytest.approx(3 * 2, rel=1e-3)
    assert concurrent_seconds([large] * 3, far, started=2) == pytest.approx(2 * 2, rel=1e-3)
    assert block_message(2**20, 2, WireSection(), connections=4).first.parts == 1
    # The bytes take as long. With two other blocks on the network, a block has one block less to hide behind.
    near = NetworkLink(96.0, connections=4)
    assert exposed("diloco", near) == exposed("diloco")
    assert exposed("edit", near) == pytest.approx(6 * BLOCK - 3 * 0.6 / 3 / 6)


def test_moments_are_waited_for_after_the_parameters() -> None:
    assert exposed("des_loc") == pytest.approx(6 * BLOCK * (1 + 1 / 3 + 1 / 6))
    late = {"kind": "overlapped", "steps": 8, "fragments": 1}
    assert exposed("des_loc", schedule=late, moments={"first": 2, "second": None}) == pytest.approx(3 * BLOCK)


def test_tcp_starts_slowly_after_a_pause() -> None:
    link = NetworkLink(mbit=80.0, latency_seconds=0.1)  # 2 MB in a round trip
    window = INITIAL_WINDOW
    assert link.restart_seconds(7 * window, pause=9.0) == pytest.approx(0.2 * 2)
    assert link.restart_seconds(window, pause=9.0) == 0
    assert link.restart_seconds(1e9, pause=9.0) == pytest.approx(0.2 * (math.log2(1 + 2e6 / window) - 1))
    assert link.restart_seconds(1e9, pause=0.9) == pytest.approx(0.2 * 2)  # two timeouts of 0.4 s
    assert link.restart_seconds(1e9, pause=0.39) == 0
    assert NetworkLink(80.0, 0.1, slow_start=False).restart_seconds(1e9, 9.0) == 0
    assert NetworkLink(80.0).restart_seconds(1e9, 9.0) == 0
    message = block_message(1_024_000, 4, WireSection(kind="bf16"))
    assert message.first.in_flight == pytest.approx(2 * 1_024_000 / 4) == message.second.in_flight
    steady = exposed("diloco", NetworkLink(96.0, 0.1, slow_start=False))
    hop = WIRE / 6
    assert exposed("diloco", NetworkLink(96.0, 0.1)) - steady == pytest.approx(
        NetworkLink(96.0, 0.1).restart_seconds(2 * hop, 12.0)
    )


def test_layerwise_hides_blocks_behind_the_forward_of_those_before() -> None:
    forward = 0.6 / 3 / 6
    assert exposed("edit") == pytest.approx(6 * BLOCK - 4 * forward)  # the last two blocks arrive together
    # On a network faster than the forward pass, the first two blocks share the network, and nothing hides them.
    assert exposed("edit", NetworkLink(mbit=9600.0)) == pytest.approx(2 * BLOCK / 100)


def test_gradients_hide_behind_the_backward_of_the_blocks_that_follow() -> None:
    backward = 0.6 * 2 / 3 / 6
    assert exposed("synchronous") == pytest.approx(6 * BLOCK - 5 * backward)
    assert exposed("synchronous", NetworkLink(mbit=9600.0)) == pytest.approx(BLOCK / 100)
    rounded = exposed("synchronous", wire={"kind": "int8", "gradients": True})
    first = 6 * BLOCK * (1 + 4 / 128) / 4 / 2
    assert rounded == pytest.approx(first - min(5 * backward, first * 5 / 6) + first, rel=1e-3)
    assert exposed("synchronous", wire="int8") == pytest.approx(6 * BLOCK - 5 * backward)


def test_a_fragment_hides_behind_its_steps() -> None:
    fp32 = {"wire": "fp32"}
    one = {"kind": "overlapped", "steps": 1, "fragments": 3}
    assert exposed("streaming_diloco", **fp32, schedule=one) == pytest.approx(3 * (2 * BLOCK - 0.6))
    assert exposed("streaming_diloco", **fp32, schedule=one | {"steps": 2}) == 0
    # All fragments together do not hide behind more steps than a round has.
    late = {"schedule": one | {"steps": 3}, **fp32, "every": 3}
    assert exposed("streaming_diloco", **late) == pytest.approx(6 * BLOCK - 3 * 0.6)
    # A fragment of two blocks, sent at once, takes 6 hops with round trips of 0.28 s. A round has three fragments.
    far = NetworkLink(1e6, 0.14, slow_start=False)
    assert exposed("streaming_diloco", far, **late) == pytest.approx(3 * 6 * 0.28 - 3 * 0.6, rel=1e-3)
    assert exposed("streaming_diloco", far, **late | {"every": 9}) == 0
    farther = NetworkLink(1e6, 0.16, slow_start=False)
    keys = late | {"every": 30}
    assert exposed("streaming_diloco", farther, **keys) == pytest.approx(3 * (6 * 0.32 - 3 * 0.6), rel=1e-3)


def test_a_fragments_second_exchange_has_the_second_half_of_its_steps() -> None:
    link = NetworkLink(mbit=6.0)
    half = 2 * BLOCK * 16 * (1 + 4 / 128) / 4 / 2  # seconds of one exchange of a fragment of 2 blocks
    keys = {"kind": "overlapped", "fragments": 3}

    def with_steps(steps: int) -> float:
        return exposed("streaming_diloco", link, wire="int8", schedule=keys | {"steps": steps})

    assert with_steps(5) == pytest.approx(3 * (half - 2 * 0.6 + half - 3 * 0.6), rel=1e-3)
    assert with_steps(1) == pytest.approx(3 * (half - 0.6 + half), rel=1e-3)


def test_the_largest_values_go_to_all_in_one_exchange() -> None:
    message = block_message(4096 * 250, 4, WireSection(kind="topk", error_feedback=True))
    assert message.second is None and message.sent == 3 * 250 * 120
    link = NetworkLink(mbit=1.0, latency_seconds=0.05, slow_start=False)
    assert message.first.seconds(link) == pytest.approx(8 * message.sent / 1e6 + 0.1)


def test_a_penalty_takes_the_first_step_of_a_messages_way() -> None:
    weighed = {"wire": "fp32", "reduction": "edit_penalty"}
    two = {"kind": "overlapped", "steps": 2, "fragments": 3}
    assert exposed("streaming_diloco", **weighed, schedule=two) == pytest.approx(3 * (2 * BLOCK - 0.6))
    assert exposed("co2", every=5, reduction="edit_penalty") == pytest.approx(6 * BLOCK - 4 * 0.6)
    seconds = {"kind": "seconds", "every": 3.0, "min_steps": 0}
    assert exposed("co2", every=5, reduction="edit_penalty", period=seconds) == pytest.approx(6 * BLOCK - 5 * 0.6)


def test_a_delayed_mean_has_a_round_but_in_rounds_of_seconds_its_second_exchange_has_none() -> None:
    assert exposed("co2", every=6) == 0
    assert exposed("co2", every=4) == pytest.approx(6 * BLOCK - 4 * 0.6)
    seconds = {"kind": "seconds", "every": 12.0, "min_steps": 0}
    assert exposed("co2", wire="int8") == 0
    assert exposed("co2", wire="int8", period=seconds) == pytest.approx(3 * BLOCK * (1 + 4 / 128) / 4, rel=1e-3)


def test_a_group_is_waited_for_in_every_step_but_the_last() -> None:
    found = round_time(sync_of("wagma"), BLOCKS, 4, 0.6, 10, FAST)
    group = 6 * BLOCK * (1 / 2) / (3 / 4)
    assert found.exposed == pytest.approx(9 * group + 6 * BLOCK)
    assert found.sent == pytest.approx((9 * (1 / 2) / (3 / 4) + 1) * 6 * WIRE)


def test_a_group_starts_slowly_when_its_turn_comes_again() -> None:
    """Each of 4 replicas has two partners in turn, so a pair's connection is idle for two steps and one other average."""
    link = NetworkLink(1e6, 0.05)
    before = 1.5 * 0.1 + 3 * 2 * 0.1  # waking, and 6 blocks in 2 hops on 2 threads
    window = 2 * 1_024_000 * 4 / 2
    doublings = math.log2(1 + window / INITIAL_WINDOW) - 1
    pause = 2 * 0.6 + before
    assert pause // (0.1 + 0.2) < doublings
    # Connections for averages of all replicas are idle for a round.
    of_all = 3 * 6 * 0.1 + 0.1 * (2 * 0.6 // (0.1 + 0.2))
    expected = before + 0.1 * (pause // 0.3) + of_all
    assert exposed("wagma", link, every=2) == pytest.approx(expected, rel=1e-2)
    # In groups of 2, each of 8 replicas has three partners in turn.
    sync = sync_of("wagma", schedule={"kind": "wait_avoiding", "group_size": 2})
    pause = 3 * 0.6 + 2 * before
    found = round_time(sync, BLOCKS, 8, 0.6, 22, link).exposed - round_time(sync, BLOCKS, 8, 0.6, 21, link).exposed
    assert found == pytest.approx(before + 0.1 * min(doublings, pause // 0.3), rel=1e-2)


def test_all_messages_that_start_at_once_share_a_window() -> None:
    """Three blocks start at once with a blocking schedule, and all blocks of a fragment with an overlapped one."""
    link = NetworkLink(mbit=1e6, latency_seconds=0.05)
    first = block_message(1_024_000, 4, WireSection(kind="bf16")).first

    def added(blocks: int) -> float:
        return link.restart_seconds(blocks * first.in_flight, 12.0)

    assert added(3) < added(6)
    assert slow_start_seconds([first] * 6, link, 12.0, started=3) == added(3)
    assert slow_start_seconds([first] * 6, link, 12.0) == added(6)
    steady = NetworkLink(1e6, 0.05, slow_start=False)

    def slower(method: str, **keys: object) -> float:
        return exposed(method, link, wire="bf16", **keys) - exposed(method, steady, wire="bf16", **keys)

    assert slower("diloco") == pytest.approx(added(3))
    hidden = {"schedule": {"kind": "overlapped", "steps": 1, "fragments": 1}, "step": 0.01, "every": 1200}
    assert slower("streaming_diloco", **hidden) == pytest.approx(added(6))


def test_backward_passes_hide_a_slow_start() -> None:
    """Only the first message starts slowly, and the backward passes of five more blocks come after it."""
    link, steady = NetworkLink(1e6, 0.05), NetworkLink(1e6, 0.05, slow_start=False)
    wire = {"kind": "int8", "gradients": True}
    for step in (6.0, 60.0):
        assert exposed("synchronous", link, step=step, wire=wire) == exposed(
            "synchronous", steady, step=step, wire=wire
        )
    waits = [exposed("synchronous", one, step=0.9, wire={**wire, "kind": "fp32"}) for one in (link, steady)]
    assert waits[0] > waits[1], "the messages take longer than the backward passes, so nothing hides the slow start"


def timed(every: float, min_steps: int, step: float = 0.6, **keys: object) -> RoundTime:
    period = {"kind": "seconds", "every": every, "min_steps": min_steps}
    return timed_round(sync_of("diloco", period=period, **keys), BLOCKS, 4, step, FAST)


def test_a_wait_is_part_of_the_seconds_of_the_next_round() -> None:
    """The wait for six blocks takes 3.1 of 30 seconds: after 45 steps, 30 seconds have passed. Later exchanges come every 50
    steps."""
    wait = 6 * BLOCK
    assert 3.0 < wait < 3.6
    assert timed(30.0, 0) == round_time(sync_of("diloco"), BLOCKS, 4, 0.6, 45, FAST)
    assert timed(30.0, 4 * 45) == timed(30.0, 0)
    assert timed(30.0, 4 * 45 + 1).compute == pytest.approx(0.6 * (45 + 50))
    assert timed(2.0, 0).compute == timed(0.1, 0).compute == 0.6, "a round has a step, even if the wait takes longer"


@pytest.mark.parametrize(("every", "min_steps"), [(30.2, 0), (30.2, 600), (2.2, 80), (0.1, 80)])
def test_timed_rounds_are_as_long_as_the_period_makes_them(every: float, min_steps: int) -> None:
    predicted, clock, ends = timed(every, min_steps), [0.0], [0]
    section = EverySecondsSection(every=every, min_steps=min_steps // 4)
    period = TimedPeriod(section, 0, 10**6, Comms(None), Comms(None), lambda: clock[0])
    steps = round(predicted.compute / 0.6)
    for step in range(1, 4 * (steps + 51)):
        period.begin_local_step(step)
        clock[0] += 0.6
        if period.ends_round(step):
            clock[0] += predicted.exposed
            ends.append(step)
    assert ends[2] - ends[1] == ends[3] - ends[2] == steps


def test_delayed_messages_of_timed_rounds_take_more_of_each_round_if_they_are_longer() -> None:
    assert timed(6.0, 0, schedule="delayed") == RoundTime(pytest.approx(6.0), 0.0, pytest.approx(6 * WIRE))
    late = timed(2.4, 0, schedule="delayed")  # four steps at first, then three, two and one
    assert (late.compute, late.exposed) == (pytest.approx(0.6), pytest.approx(6 * BLOCK - 0.6))


def test_one_replica_waits_for_nobody() -> None:
    assert round_time(sync_of("diloco"), BLOCKS, 1, 0.6, 20, NetworkLink(1.0, 1.0)) == RoundTime(12.0, 0.0, 0.0)


def test_every_schedule_has_a_time() -> None:
    for section in get_args(AnySchedule):
        keys = {"schedule": section.model_fields["kind"].default}
        assert math.isfinite(exposed("diloco", every=20, **keys)), keys
