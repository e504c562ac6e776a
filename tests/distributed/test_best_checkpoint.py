"""Tests of the best checkpoint of a run. It is kept when newer ones are written and when the run is stopped, killed and continued,
and the run names it at its end."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.checkpoint_retention import BEST
from llmtrain.config import Recipe
from llmtrain.errors import DONE, STOPPED_EARLY, CheckpointError
from llmtrain.export.request import choose_step
from llmtrain.parallel.world import World
from llmtrain.run_files import complete_checkpoints
from llmtrain.train.run import run_training
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.trainer import Trainer
from llmtrain.train.validation import Validation
from tests.distributed.pool import RankPool
from tests.distributed.reshard_runs import recipe_of, write_texts
from tests.distributed.test_resume_training import fit_timed

ALONE = World(0, 1, 0, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("best")
    write_texts(folder)
    return folder


def recipe(folder: Path, name: str, *keys: str) -> Recipe:
    """Return a recipe that writes a checkpoint in every step, keeps one, and validates in every second step."""
    every = ("train.steps=8", "checkpoint.every=1", "checkpoint.keep=1", "eval.every=2", "log.every=1")
    return recipe_of(folder, name, "parallel.replicas=1", "parallel.shards=1", "train.micro_batch=12", *every, *keys)


def losing(losses: dict[int, float], stop_at: int | None = None) -> Callable[[Trainer], None]:
    """Return a function that alters a trainer: its validations find these losses, by step, and it stops after step `stop_at`."""

    def alter(trainer: Trainer) -> None:
        text = trainer.validator.sets[0]
        trainer.validator.run = lambda *_, **__: (
            [(text, Validation(losses[trainer.state.global_step], 496))],
            None,
        )
        trainer.after_step.append(lambda step: setattr(trainer.metrics.stop, "requested", step == stop_at))

    return alter


def steps_of(run: Recipe) -> list[int]:
    return list(complete_checkpoints(RunDirectory(run).checkpoints))


def test_the_best_outlives_newer_ones_a_stop_and_a_kill(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recipe(folder, "outlives")
    path, directory = RunDirectory(run).path, RunDirectory(run)
    losses = {0: 7.0, 2: 1.0, 4: math.nan, 6: 2.0, 8: 3.0}
    assert run_training(run, ALONE, losing(losses, stop_at=5)) == STOPPED_EARLY
    assert steps_of(run) == [2, 5], "step 3 was not validated, and the loss of step 4 is NaN"
    assert directory.summary()["best_checkpoint_step"] == 2
    assert run_training(run, ALONE, losing(losses)) == DONE
    assert steps_of(run) == [2, 8] and choose_step(path, BEST) == 2 and choose_step(path) == 8
    assert "The best checkpoint is of step 2, validation loss 1.0000 (--step best in" in capsys.readouterr().out
    summary = directory.summary()
    assert (summary["best_checkpoint_step"], summary["best_checkpoint_loss"]) == (2, 1.0)
    shutil.rmtree(directory.checkpoints / "step-00000008")  # as if the run had been killed before
    (path / "summary.json").unlink()
    assert run_training(run, ALONE, losing(losses | {4: 0.5})) == DONE
    assert steps_of(run) == [4, 8], "a better one of the steps trained again takes its place"
    longer = recipe(folder, "outlives", "train.steps=10")
    assert run_training(longer, ALONE, losing({10: 0.25})) == DONE
    assert steps_of(run) == [10]
    assert "The best checkpoint" not in capsys.readouterr().out.rpartition("continuing")[2], "the best is the newest"
    assert json.loads((path / "summary.json").read_text())["best_checkpoint_step"] == 10


def test_the_best_may_be_deleted(folder: Path) -> None:
    run = recipe(folder, "deleted", "checkpoint.keep_best=false", "train.steps=4")
    assert run_training(run, ALONE, losing({0: 7.0, 2: 1.0, 4: 2.0})) == DONE
    assert steps_of(run) == [4]


def test_a_run_that_validates_elsewhere_has_no_best(folder: Path) -> None:
    run = recipe(folder, "elsewhere", "eval.every=null")
    assert run_training(run, ALONE, losing({0: 7.0}, stop_at=4)) == STOPPED_EARLY
    assert RunDirectory(run).summary()["best_checkpoint_step"] is None
    with pytest.raises(CheckpointError, match="no checkpoint whose step was validated"):
        choose_step(RunDirectory(run).path, BEST)


def test_ranks_agree_on_what_is_kept(ranks: RankPool, folder: Path) -> None:
    """Only the first rank decides and deletes."""
    keys = ("train.steps=9", "checkpoint.keep=1", "checkpoint.every=3", "eval.every=3", "optim.lr=1e-9", "log.every=3")
    run = recipe_of(folder, "ranks", "sync.method=diloco", "sync.warmup_steps=2", *keys)
    assert ranks.run(fit_timed, run, (), world_size=2) == ["done", "done"]
    lines = [json.loads(line) for line in RunDirectory(run).metrics.read_text().splitlines()]
    losses = {line["step"]: line["eval/loss"] for line in lines if line.get("eval/loss") and line["step"]}
    best = min(losses, key=lambda step: (losses[step], -step))
    assert steps_of(run) == sorted({best, 9})
