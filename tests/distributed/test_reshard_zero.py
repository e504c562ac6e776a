"""Tests of another mesh and another engine at once: an engine loads the checkpoint of another one by the same rules."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.distributed.pool import RankPool
from tests.distributed.reshard_rules import assert_follows_the_rules, newest, read_checkpoint
from tests.distributed.reshard_runs import Part, recipe_of, rewrite, run_parts, write_texts

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

TAKES_OVER = [
    ("fsdp2", "zero3", (2, 1), (1, 1)),
    pytest.param("fsdp2", "zero3", (2, 1), (1, 2), marks=pytest.mark.deep),
    pytest.param("fsdp2", "zero3", (2, 2), (4, 1), marks=pytest.mark.deep),
    pytest.param("zero3", "fsdp2", (2, 2), (3, 1), marks=pytest.mark.deep),
    pytest.param("zero2", "zero1", (2, 2), (1, 4), marks=pytest.mark.deep),
]


@pytest.fixture
def zero_ranks() -> Iterator[RankPool]:
    """Yield a new pool of ranks for each test, because DeepSpeed counts parameters across engines."""
    pool = RankPool(4)
    yield pool
    pool.close()


def engine(name: str) -> list[str]:
    stage = [f"parallel.zero_stage={name[-1]}"] if name.startswith("zero") else []
    return [f"parallel.engine={name.rstrip('123') if stage else name}", *stage]


@pytest.mark.parametrize(("first", "second", "of", "mesh"), TAKES_OVER, ids=lambda value: str(value))
def test_other_replicas_under_another_engine(
    zero_ranks: RankPool, tmp_path: Path, first: str, second: str, of: tuple[int, int], mesh: tuple[int, int]
) -> None:
    """The checkpoint, within a round of DiLoCo, has anchor, momentum, inner moments and rounding errors."""
    write_texts(tmp_path)
    method = ("sync.method=diloco", "sync.warmup_steps=2", "sync.wire={kind: int4, error_feedback: true}")
    keys = (*method, "parallel.precision=fp32", "train.steps=9")
    begun, goes_on = (recipe_of(tmp_path, "run", *keys, *engine(name)) for name in (first, second))
    [[before], *_] = zero_ranks.run(run_parts, [Part(begun, *of, 7)], world_size=of[0] * of[1], timeout=600)
    size = mesh[0] * mesh[1]
    zero_ranks.run(rewrite, [(Part(goes_on, *mesh, 99), tmp_path / "rewritten")], world_size=size, timeout=600)
    old = read_checkpoint(newest(tmp_path / "runs/run/checkpoints"))
    assert_follows_the_rules(read_checkpoint(newest(tmp_path / "rewritten")), old, rtol=3e-7)
    [[after], *_] = zero_ranks.run(run_parts, [Part(goes_on, *mesh, 9)], world_size=size, timeout=600)
    assert after.validation[0] == pytest.approx(before.validation[1], rel=1e-5)
    assert after.validation[1] < after.validation[0]
