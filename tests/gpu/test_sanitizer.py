"""torch's search for data races between streams finds none in EDiT with offload, and one where a wait is left out."""

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
    """Two ranks of their own: once torch listens to all streams of a process, it does not stop."""
    pool = RankPool(2)
    yield pool
    pool.close()


def train_watched(case: Case, changes: tuple[str, ...] = ()) -> Bits:
    """Train while torch listens. It is told to in the rank, because what it does at each operation starts CUDA, which the
    process that forks ranks must not do while it imports (`TORCH_CUDA_SANITIZER`)."""
    watch_streams()
    return train_to_bits(case, changes)


@pytest.mark.parametrize("schedule", ["layerwise", "blocking"])
def test_no_stream_overtakes_another(watched: RankPool, schedule: str) -> None:
    watched.run(train_watched, offloaded(schedule))


def test_a_wait_left_out_is_found(watched: RankPool) -> None:
    with pytest.raises(RankFailure, match="CUDASanitizerErrors"):
        watched.run(train_watched, offloaded("layerwise"), ("without_the_wait_of_use",))
