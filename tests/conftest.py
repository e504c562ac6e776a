"""Fixtures and environment of all tests: no network, a pool of ranks, the real data where it is present, and a terminal."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import budget, mother
from tests.distributed.pool import RankPool

# Variables that the caller's job or terminal may have set, and that tests must not see.
OF_OTHERS = ("SLURM_", "MASTER_", "TORCHELASTIC_", "GROUP_", "GLOO_SOCKET_", "NCCL_SOCKET_")
RANKS = {"NNODES", "NODE_RANK", "NPROC_PER_NODE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
COLORS = {"FORCE_COLOR", "PY_COLORS", "CLICOLOR_FORCE", "NO_COLOR", "GITHUB_ACTIONS", "PYTEST_ADDOPTS"}
for name in list(os.environ):
    if name.startswith(OF_OTHERS) or name in RANKS | COLORS:
        del os.environ[name]
FRESH_SECONDS = 900
"""Timeout of a test that starts new interpreters, long enough for a busy machine."""
# Set before any test imports torch or transformers. Every process that a test starts inherits these variables.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # or torch.compile probes the CPU's vector instructions for 9 CPU s
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at the first product
os.environ["KINETO_LOG_LEVEL"] = "99"  # or torch's profiler logs when it starts and stops


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run only the tests that need a GPU")
    budget.pytest_addoption(parser)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are imported, as in llmtrain.startup.imports_without_gc
    if not config.getoption("--gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all other tests run on CPUs, also on a machine with GPUs
    if config.getoption("numprocesses", None):
        os.environ[mother.ADDRESS] = mother.start()  # one for all workers, imports while they collect
    config.pluginmanager.register(budget.Budget(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    needed = {item: item.get_closest_marker("gpu") is not None for item in items}
    if config.getoption("--gpu"):
        items[:] = [item for item in items if needed[item]]
    for item in items:
        if item.get_closest_marker("fresh"):
            item.add_marker(pytest.mark.timeout(FRESH_SECONDS))
        if needed[item] and not config.getoption("--gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU; make test-gpu"))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Provide four gloo ranks that live as long as the test session. The first test that runs something on them starts them."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Provide the folder of real data: $LLMTRAIN_DATA, or `../shared/data` beside the repository."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("LLMTRAIN_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"no real data in {folder}; set LLMTRAIN_DATA to a folder that has it")
    return folder


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Rich treat its output as a terminal."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
