"""torch's search for data races between streams finds none in EDiT with offload, and one where a wait is left out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import RankFailure, RankPool
from tests.gpu.on_gpu import offloaded, train_to_bits

pytestmark = pytest.mark.real_gpu


@pytest.fixture(scope="module")
def watched() -> Iterator[RankPool]:
    """Two ranks in which torch listens to all streams."""
    pool = RankPool(2, {"TORCH_CUDA_SANITIZER": "1"})
    yield pool
    pool.close()


@pytest.mark.parametrize("schedule", ["layerwise", "blocking"])
def test_no_stream_overtakes_another(watched: RankPool, schedule: str) -> None:
    watched.run(train_to_bits, offloaded(schedule))


def test_a_wait_left_out_is_found(watched: RankPool) -> None:
    with pytest.raises(RankFailure, match="CUDASanitizerErrors"):
        watched.run(train_to_bits, offloaded("layerwise"), ("without_the_wait_of_use",))
