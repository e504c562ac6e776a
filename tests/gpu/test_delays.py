"""Tests of delayed streams, layerwise and blocking: a delay changes no bit, but a missing wait does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import RankPool
from tests.gpu.on_gpu import Bits, offloaded, train_to_bits

SCHEDULES = ("layerwise", "blocking")


@pytest.fixture(scope="module")
def expected(ranks: RankPool) -> dict[str, list[Bits]]:
    """Return the results of both ranks without delays, by schedule."""
    return {schedule: ranks.run(train_to_bits, offloaded(schedule), world_size=2) for schedule in SCHEDULES}


def test_training_repeats_itself_to_the_last_bit(ranks: RankPool, expected: dict[str, list[Bits]]) -> None:
    """Otherwise the other tests here would prove nothing."""
    assert ranks.run(train_to_bits, offloaded("layerwise"), world_size=2) == expected["layerwise"]
    assert len(set(expected["layerwise"][0].losses)) > 1


def test_layer_by_layer_is_blocking(expected: dict[str, list[Bits]]) -> None:
    assert expected["layerwise"] == expected["blocking"]


@pytest.mark.parametrize("late", ["side_stream_delayed", "main_stream_delayed"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_late_stream_changes_no_bit(
    ranks: RankPool, expected: dict[str, list[Bits]], schedule: str, late: str
) -> None:
    assert ranks.run(train_to_bits, offloaded(schedule), (late,), world_size=2) == expected[schedule]


def test_fsdp2_with_one_rank_gives_the_same_bits(ranks: RankPool, expected: dict[str, list[Bits]]) -> None:
    """With one rank, FSDP2 does not gather but copies in the main stream, so delays and missing gathers would have no
    effect here. tests/emulated_gpu tests a missing gather with two shards."""
    assert ranks.run(train_to_bits, offloaded("layerwise"), ("under_fsdp2",), world_size=2) == expected["layerwise"]


@pytest.fixture(scope="module")
def one_kernel_at_a_time() -> Iterator[RankPool]:
    """Provide two ranks whose host waits for every kernel. CUDA reads the variable when it starts, in the rank."""
    pool = RankPool(2, {"CUDA_LAUNCH_BLOCKING": "1"}, own_mother=False)
    yield pool
    pool.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_waiting_for_every_kernel_changes_no_bit(
    one_kernel_at_a_time: RankPool, expected: dict[str, list[Bits]], schedule: str
) -> None:
    assert one_kernel_at_a_time.run(train_to_bits, offloaded(schedule)) == expected[schedule]


@pytest.mark.real_gpu
@pytest.mark.parametrize(
    ("careless", "late"),
    [
        ("without_the_wait_of_use", "side_stream_delayed"),
        ("without_the_wait_of_write_back", "main_stream_delayed"),
    ],
)
def test_a_wait_left_out_changes_bits(
    ranks: RankPool, expected: dict[str, list[Bits]], careless: str, late: str
) -> None:
    """Bits may change on one rank alone: the other rank gets them only with the next message, if there is one."""
    assert ranks.run(train_to_bits, offloaded("layerwise"), (careless, late), world_size=2) != expected["layerwise"]
