"""Tests with torch's CUDA sanitizer, which looks for data races between streams: it finds none in EDiT with offload,
and one where a wait is left out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import RankFailure, RankPool
from tests.distributed.real_engine import Case
from tests.gpu.on_gpu import Bits, offloaded, train_to_bits
from tests.inside_torch import watch_streams

pytestmark = pytest.mark.real_gpu


@pytest.fixture(scope="module")
def watched() -> Iterator[RankPool]:
    """Provide separate ranks, because the sanitizer can't be turned off again in a process."""
    pool = RankPool(2)
    yield pool
    pool.close()


def train_watched(case: Case, changes: tuple[str, ...] = ()) -> Bits:
    """Train under the sanitizer, which is enabled in the rank, because its work at each operation starts CUDA. With the
    variable `TORCH_CUDA_SANITIZER`, it would do so in the process that forks the ranks, which must not start CUDA."""
    watch_streams()
    return train_to_bits(case, changes)


@pytest.mark.parametrize("schedule", ["layerwise", "blocking"])
def test_no_stream_overtakes_another(watched: RankPool, schedule: str) -> None:
    watched.run(train_watched, offloaded(schedule))


def test_a_wait_left_out_is_found(watched: RankPool) -> None:
    with pytest.raises(RankFailure, match="CUDASanitizerErrors"):
        watched.run(train_watched, offloaded("layerwise"), ("without_the_wait_of_use",))
