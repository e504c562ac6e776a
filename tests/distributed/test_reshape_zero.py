"""Another mesh and another engine at once: what FSDP2 or ZeRO wrote, the other takes over by the same rules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.pool import RankPool
from tests.distributed.reshape_rules import assert_follows_the_rules, newest, read_checkpoint
from tests.distributed.reshape_runs import Part, recipe_of, rewrite, run_parts, write_texts

pytest.importorskip("deepspeed")

TAKES_OVER = [("fsdp2", "zero3", (4, 1)), ("zero3", "fsdp2", (3, 1)), ("zero2", "zero1", (1, 4))]


@pytest.fixture(scope="module")
def zero_ranks() -> Iterator[RankPool]:
    """Ranks of their own: DeepSpeed keeps much that is global."""
    pool = RankPool(4)
    yield pool
    pool.close()


def engine(name: str) -> list[str]:
    stage = [f"parallel.zero_stage={name[-1]}"] if name.startswith("zero") else []
    return [f"parallel.engine={name.rstrip('123') if stage else name}", *stage]


@pytest.mark.parametrize(("first", "second", "mesh"), TAKES_OVER, ids=lambda value: str(value))
def test_other_replicas_under_another_engine(
    zero_ranks: RankPool, tmp_path: Path, first: str, second: str, mesh: tuple[int, int]
) -> None:
    """In a round of DiLoCo, with anchor, momentum, inner moments and rounding errors; then to its end."""
    write_texts(tmp_path)
    method = ("sync.method=diloco", "sync.warmup_steps=2", "sync.wire={kind: int4, feedback: true}")
    keys = (*method, "parallel.precision=fp32", "train.steps=11")
    begun, goes_on = (recipe_of(tmp_path, "run", *keys, *engine(name)) for name in (first, second))
    [[before], *_] = zero_ranks.run(run_parts, [Part(begun, 2, 2, 9)], timeout=600)
    size = mesh[0] * mesh[1]
    zero_ranks.run(rewrite, [(Part(goes_on, *mesh, 99), tmp_path / "rewritten")], world_size=size, timeout=600)
    old = read_checkpoint(newest(tmp_path / "runs/run/checkpoints"))
    assert_follows_the_rules(read_checkpoint(newest(tmp_path / "rewritten")), old, rtol=3e-7)
    [[after], *_] = zero_ranks.run(run_parts, [Part(goes_on, *mesh, 11)], world_size=size, timeout=600)
    assert after.validation[0] == pytest.approx(before.validation[1], rel=1e-5)
    assert after.validation[1] < after.validation[0]
