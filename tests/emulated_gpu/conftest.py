"""Fixtures of ranks and runs with emulated GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import RankPool
from tests.emulated_gpu.as_cuda import environment
from tests.emulated_gpu.build import build, why_not
from tests.end_to_end.runs import Runs


@pytest.fixture(scope="session")
def emulation() -> dict[str, str]:
    """Provide the environment of a process with GPUs."""
    if reason := why_not():
        pytest.skip(f"GPUs can't be emulated: {reason}")
    return environment(build())


@pytest.fixture(scope="module")
def gpu_ranks(emulation: dict[str, str]) -> Iterator[RankPool]:
    """Yield a pool of four ranks with a GPU each."""
    pool = RankPool(4, emulation)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def cpu_ranks() -> Iterator[RankPool]:
    """Yield a pool of four ranks without GPUs, for one module alone, because DeepSpeed has much global state."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def gpu_runs(emulation: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Provide runs from the command line that find GPUs."""
    return Runs(tmp_path_factory.mktemp("gpu"), emulation)
