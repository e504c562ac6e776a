"""Tests of numbers that go bad on one replica: a gradient that is not finite, an anchor with a changed bit, a rounded step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from llmtrain.config import Recipe
from llmtrain.errors import TrainingError
from llmtrain.sync.anchors import flatten
from llmtrain.train.trainer import Trainer
from tests.distributed.pool import RankPool
from tests.distributed.reshard_runs import Part, Seen, fit, recipe_of, trainer_of, write_texts

SICK = 1
"""Replica whose numbers go bad."""
METHODS = {
    "synchronous": ("sync.method=local_sgd", "sync.warmup_steps=11"),
    "diloco": ("sync.method=diloco", "sync.warmup_steps=2"),
    "edit": ("sync.method=edit", "sync.warmup_steps=2"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numbers")
    write_texts(folder)
    return folder


def make_nan(trainer: Trainer, steps: Sequence[int]) -> None:
    """Make the sick replica's loss NaN in these steps, and with it its gradients before they are averaged."""
    model = trainer.engine.model
    forward = model.forward

    def wrapped(*batch: torch.Tensor) -> torch.Tensor:
        is_sick = trainer.metrics.mesh.replica_comms.rank == SICK and trainer.state.step in steps
        return forward(*batch) * (math.nan if is_sick else 1)

    model.forward = wrapped


def train(recipe: Recipe, steps: Sequence[int]) -> tuple[str, int, bool, float | None]:
    """Train with a NaN in these steps. Return how the run ended or its error, the number of skipped steps, whether all weights are
    finite, and the number of skipped steps in the last log line."""
    trainer = trainer_of(Part(recipe, 2, 1, recipe.train.total_steps + 1), Seen())
    trainer.metrics.stop.requested = False
    trainer.recipe = recipe
    make_nan(trainer, steps)
    try:
        ended = fit(trainer)
    except TrainingError as error:
        ended = str(error)
        trainer.method.close()
        trainer.checkpointer.finish_writing()
    weights = all(bool(shard.isfinite().all()) for block in trainer.engine.blocks for shard in block.shards)
    return ended, int(trainer.state.skipped), weights, trainer.metrics.last_line.get("health/skipped_steps")


def at_anchor(trainer: Trainer) -> list[bool]:
    """Return for each block whether its parameters equal the anchor."""
    blocks, anchors = trainer.engine.blocks, trainer.method.block_sync.anchors.anchor
    return [torch.equal(flatten(block), anchor) for block, anchor in zip(blocks, anchors, strict=True)]


def roll_back(recipe: Recipe) -> tuple[str, int, list[tuple[int, bool, bool]]]:
    """Train with a NaN in step 8. Return how the run ended, the number of skipped steps, and for each rollback: its step, and whether
    all blocks were at the anchor before and after it."""
    trainer = trainer_of(Part(recipe, 2, 1, recipe.train.total_steps + 1), Seen())
    trainer.metrics.stop.requested = False
    trainer.recipe = recipe
    make_nan(trainer, range(8, 9))
    back, seen = trainer.method.roll_back, []

    def wrapped() -> None:
        before = all(at_anchor(trainer))
        back()
        seen.append((trainer.state.step, before, all(at_anchor(trainer))))

    trainer.method.roll_back = wrapped
    return fit(trainer), int(trainer.state.skipped), seen


def change_a_bit(recipe: Recipe) -> str:
    """Train, and change a bit of the sick replica's anchor after step 5. Return how the run ended, or its error."""
    trainer = trainer_of(Part(recipe, 2, 1, recipe.train.total_steps + 1), Seen())
    trainer.metrics.stop.requested = False
    trainer.recipe = recipe
    end_step = trainer.method.end_step

    def wrapped(step: int, tokens: int) -> None:
        end_step(step, tokens)
        if step == 5 and trainer.metrics.mesh.replica_comms.rank == SICK:
            anchor = trainer.method.block_sync.anchors.anchor[0]
            anchor[0] = math.nextafter(anchor[0].item(), math.inf)

    trainer.method.end_step = wrapped
    try:
        return fit(trainer)
    except TrainingError as error:
        return str(error)
    finally:
        trainer.method.close()


def round_differently(recipe: Recipe, shards: int) -> tuple[str, list[str], list[bool]]:
    """Let the sick replica's last rank round the last synchronous step up. Return how the run ended, its warnings, and whether this
    rank began its first round at the anchor, with the parameters that all ranks would have had."""
    trainer = trainer_of(Part(recipe, 2, shards, recipe.train.total_steps + 1), Seen())
    trainer.metrics.stop.requested = False
    trainer.recipe = recipe
    end_step, begin_step, mesh = trainer.method.end_step, trainer.method.schedule.begin_step, trainer.metrics.mesh
    expected: list[torch.Tensor] = []
    at_start: list[bool] = []

    def end(step: int, tokens: int) -> None:
        end_step(step, tokens)
        if step == 2:
            expected[:] = map(flatten, trainer.engine.blocks)
            if mesh.replica_comms.rank == SICK and mesh.shard_comms.rank == shards - 1:
                shard = trainer.engine.blocks[1].shards[0].view(-1)
                shard[0] = math.nextafter(shard[0].item(), math.inf)

    def begin() -> None:
        if not at_start:
            at_start.extend(map(torch.equal, map(flatten, trainer.engine.blocks), expected))
            at_start.extend(at_anchor(trainer))
        begin_step()

    trainer.method.end_step, trainer.method.schedule.begin_step = end, begin
    return fit(trainer), trainer.metrics.run_log.warnings, at_start


def test_a_bad_gradient_ends_the_run_on_all_ranks_with_one_line(ranks: RankPool, folder: Path) -> None:
    for name, overrides in METHODS.items():
        recipe = recipe_of(folder, f"stop-{name}", *overrides, "train.steps=12", "log.every=2")
        (first, *_), (second, *_) = ranks.run(train, recipe, range(6, 7), world_size=2, timeout=300)
        assert first == second, name
        assert first.startswith("the loss is nan on rank 1 (replica 1) at step 6"), first
        assert "\n" not in first and not (folder / f"runs/stop-{name}/checkpoints").exists()
    keys = ("train.steps=12", "log.every=10", "checkpoint.every=3")
    recipe = recipe_of(folder, "between", *METHODS["diloco"], *keys)
    (first, *_), (second, *_) = ranks.run(train, recipe, range(4, 5), world_size=2, timeout=300)
    assert first == second and first.startswith(
        "the loss is nan on rank 1 (replica 1) at step 6 or in the 3 steps before"
    ), first
    assert [path.name for path in sorted((folder / "runs/between/checkpoints").glob("step-*"))] == ["step-00000003"]


def test_a_bad_gradient_is_left_out_and_counted_where_the_recipe_says_so(ranks: RankPool, folder: Path) -> None:
    for name, overrides in METHODS.items():
        keys = [*overrides, "train.steps=12", "log.every=2", "optim.nonfinite=skip"]
        seen = ranks.run(train, recipe_of(folder, f"skip-{name}", *keys), range(6, 8), world_size=2, timeout=300)
        everywhere = name == "synchronous"  # all replicas have the mean gradient
        assert [ended for ended, *_ in seen] == ["done", "done"], name
        assert [skipped for _, skipped, *_ in seen] == ([2, 2] if everywhere else [0, 2]), name
        assert all(finite for *_, finite, _ in seen)
        assert seen[0][3] == (4 if everywhere else 2)


def test_a_bad_gradient_takes_its_replica_back_to_the_anchor_where_the_recipe_says_so(
    ranks: RankPool, folder: Path
) -> None:
    for name in ("diloco", "edit"):
        keys = [*METHODS[name], "train.steps=12", "log.every=2", "optim.nonfinite=rollback"]
        well, sick = ranks.run(roll_back, recipe_of(folder, f"back-{name}", *keys), world_size=2, timeout=300)
        assert well == ("done", 0, []) and sick == ("done", 1, [(8, False, True)]), name


def test_a_replica_that_leaves_out_every_step_ends_the_run(ranks: RankPool, folder: Path) -> None:
    keys = [*METHODS["diloco"], "train.steps=40", "log.every=2", "optim.nonfinite=skip"]
    seen = ranks.run(train, recipe_of(folder, "always", *keys), range(4, 99), world_size=2, timeout=300)
    assert seen[0][0] == seen[1][0]
    assert seen[0][0].startswith("replica 1 skipped its last 11 steps up to step 14: no gradient was finite"), seen[0][
        0
    ]


def test_a_good_step_ends_a_row_of_steps_left_out(ranks: RankPool, folder: Path) -> None:
    """Each of the two rows is too short to end a run; together they would be long enough."""
    keys = [*METHODS["diloco"], "train.steps=18", "log.every=2", "optim.nonfinite=skip"]
    rows = [*range(4, 11), *range(12, 18)]
    seen = ranks.run(train, recipe_of(folder, "two-rows", *keys), rows, world_size=2, timeout=300)
    assert [(ended, skipped) for ended, skipped, *_ in seen] == [("done", 0), ("done", len(rows))]


def test_an_anchor_with_a_changed_bit_is_found(ranks: RankPool, folder: Path) -> None:
    keys = [*METHODS["diloco"], "train.steps=24", "log.every=1", "sync.verify_every=1"]
    first, second = ranks.run(change_a_bit, recipe_of(folder, "bit", *keys), world_size=2, timeout=300)
    assert first == second
    assert first.startswith("the anchors of the 2 replicas differ, found at step"), first
    never = recipe_of(folder, "unseen", *keys, "sync.verify_every=null")
    assert ranks.run(change_a_bit, never, world_size=2, timeout=300) == ["done", "done"]


@pytest.mark.parametrize("shards", [1, 2])
def test_replicas_that_synchronous_steps_left_different_continue_with_the_first_ones(
    ranks: RankPool, folder: Path, shards: int
) -> None:
    keys = [*METHODS["edit"], "train.steps=12", "log.every=1", "sync.verify_every=1"]
    recipe = recipe_of(folder, f"rounded-{shards}", *keys)
    seen = ranks.run(round_differently, recipe, shards, world_size=2 * shards, timeout=300)
    assert all(ended == "done" and at_start and all(at_start) for ended, _, at_start in seen)
    (warning,) = seen[0][1]
    assert warning.startswith("step 3: replicas had different parameters after the synchronous steps")
