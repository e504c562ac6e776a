"""Tests of checkpoint retention: which checkpoint is the best, that it is kept, and how users select it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from llmtrain.checkpoint_retention import (
    BEST,
    CheckpointLoss,
    best_step,
    expired,
    loss_of,
    max_on_disk,
    read_loss,
    read_losses,
)
from llmtrain.config import CheckpointSection
from llmtrain.errors import CheckpointError, UserError
from llmtrain.eval.evaluated_checkpoint import check_model_path
from llmtrain.export.request import choose_step, parse_step
from llmtrain.run_files import STATE_FILE, complete_checkpoints, step_name
from llmtrain.train.checkpoint_files import set_aside_newer


def losses(**of_step: float | None) -> dict[int, CheckpointLoss | None]:
    """Return losses by step: `step10=1.5` is a loss of 1.5 for the checkpoint of step 10."""
    found = {int(name.removeprefix("step")): loss for name, loss in of_step.items()}
    return {step: None if loss is None else CheckpointLoss(loss, 100) for step, loss in found.items()}


def state(step: int, loss: float, evaluated: int | None = None) -> dict[str, Any]:
    progress = {"last_eval": {"loss": loss, "tokens": 100}, "last_evaluated": step if evaluated is None else evaluated}
    return {"step": step, "ranks": [progress, progress]}


def test_the_lowest_loss_is_the_best_and_the_latest_of_equal_ones() -> None:
    assert best_step(losses(step1=2.0, step2=1.0, step3=1.5, step4=None)) == 2
    assert best_step(losses(step1=1.0, step2=1.0, step3=1.5)) == 2
    assert best_step(losses(step1=None)) is None is best_step({})


def test_losses_over_other_tokens_than_the_latest_ones_do_not_count() -> None:
    assert (
        best_step({1: CheckpointLoss(1.0, 50), 2: CheckpointLoss(3.0, 100), 3: CheckpointLoss(4.0, 100), 4: None}) == 2
    )


def test_a_checkpoint_has_the_loss_of_its_own_step_if_that_is_finite() -> None:
    assert loss_of(state(4, 1.5)) == CheckpointLoss(1.5, 100)
    assert loss_of(state(4, 1.5, evaluated=2)) is None
    assert loss_of(state(4, math.nan)) is loss_of(state(4, math.inf)) is None
    assert loss_of({"step": 4, "ranks": [{}]}) is loss_of({"step": 4, "ranks": []}) is None


def test_a_damaged_or_missing_state_has_no_loss(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps(state(4, math.nan)))
    assert read_loss(tmp_path) is None
    (tmp_path / "state.json").write_text(json.dumps(state(4, 1.5)))
    assert read_loss(tmp_path) == CheckpointLoss(1.5, 100)
    (tmp_path / "state.json").write_text("{")
    assert read_loss(tmp_path) is None is read_loss(tmp_path / "none")


def test_the_best_stays_beside_the_newest_and_the_multiples() -> None:
    found = losses(step1=1.5, step2=1.0, step3=3.0, step4=2.0, step5=None)
    assert expired(found, CheckpointSection(keep=2)) == [1, 3]
    assert expired(found, CheckpointSection(keep=2, keep_every=3)) == [1]
    assert expired(found, CheckpointSection(keep=2, keep_best=False)) == [1, 2, 3]
    uneven = CheckpointSection(keep=1, keep_every=1000, keep_best=False)
    assert expired(dict.fromkeys([400, 1037, 1500, 2050, 2100, 3010]), uneven) == [400, 1500, 2100]
    assert expired(found, CheckpointSection(keep=4)) == [1], "the best is among the newest"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step, loss in ((10, 1.5), (20, 1.0), (30, 2.0)):
        (tmp_path / f"checkpoints/step-{step:08d}").mkdir(parents=True)
        (tmp_path / f"checkpoints/step-{step:08d}/state.json").write_text(json.dumps(state(step, loss)))
    (tmp_path / "recipe.yaml").write_text("")
    return tmp_path


def test_the_best_is_chosen_by_name(run: Path) -> None:
    assert choose_step(run, BEST) == 20 and choose_step(run) == 30
    check_model_path(run, BEST)
    for path in run.glob("checkpoints/*/state.json"):
        path.write_text(json.dumps(state(1, math.nan)))
    for refused in (choose_step, check_model_path):
        with pytest.raises(
            CheckpointError, match=r"no checkpoint whose step was validated.* --step of 10, 20, 30, or let"
        ):
            refused(run, BEST)


def test_a_step_is_a_number_or_best() -> None:
    assert (parse_step(None), parse_step("best"), parse_step("0012")) == (None, BEST, 12)
    for wrong in ("newest", "-1", "1.5", ""):
        with pytest.raises(UserError, match=r"--step is '.*'; expected a number such as 1000, or best"):
            parse_step(wrong)


def test_damaged_checkpoints_count_neither_among_the_newest_nor_as_the_best(tmp_path: Path) -> None:
    """The run has gone back to step 200, because 300 and 400 are damaged."""
    folder = tmp_path / "checkpoints"
    for step in (100, 200, 300, 400):
        (folder / step_name(step)).mkdir(parents=True)
        (folder / step_name(step) / STATE_FILE).write_text(json.dumps(state(step, 500 - step)))
    (folder / "step-00000400.damaged").mkdir()
    said: list[str] = []
    set_aside_newer(folder, 200, said.append)
    assert said == [f"step-00000{step}, which is damaged, is now step-00000{step}.damaged" for step in (300, 400)]
    assert list(complete_checkpoints(folder)) == [100, 200]
    assert best_step(read_losses(folder)) == 200
    assert (folder / "step-00000400.damaged" / STATE_FILE).exists(), "it replaces the one set aside before"
    assert (folder / "latest").read_text() == "step-00000200\n"


def test_a_disk_needs_room_for_those_that_are_kept_for_good_and_one_more() -> None:
    assert max_on_disk(23_842, CheckpointSection(keep=3, keep_best=True)) == 5
    assert max_on_disk(23_842, CheckpointSection(keep=3, keep_best=False, keep_every=10_000)) == 6
    every_100 = CheckpointSection(keep=1, keep_best=False, every=1000, keep_every=100)
    assert max_on_disk(23_842, every_100) == 24, "all checkpoints that the run writes"


def test_a_disk_needs_room_for_no_more_checkpoints_than_the_run_writes() -> None:
    at_the_end = CheckpointSection(every=None, keep=3, keep_best=False, keep_every=10_000)
    assert max_on_disk(23_842, at_the_end) == 1
    assert [max_on_disk(steps, CheckpointSection()) for steps in (999, 1000, 1001, 4000, 4001, 9000)] == [
        1,
        1,
        2,
        4,
        5,
        5,
    ]
