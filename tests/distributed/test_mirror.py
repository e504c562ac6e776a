"""Tests of a run's mirror: every rank gets its errors, and damaged checkpoints are fetched from it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from llmtrain.config import Recipe
from llmtrain.errors import DONE, STOPPED_EARLY, CheckpointError, RecipeError, TrainingError
from llmtrain.parallel.world import World
from llmtrain.recipe_loader import load_recipe
from llmtrain.run_files import complete_checkpoints
from llmtrain.train.mirror import Mirror, RemoteRun
from llmtrain.train.run import run_training
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.trainer import Trainer
from tests.distributed.pool import RankPool
from tests.distributed.real_engine import mesh_of
from tests.distributed.reshard_runs import recipe_of, write_texts
from tests.end_to_end.runs import exact_lines
from tests.unit.test_checkpoint_files import flip

ALONE = World(0, 1, 0, 1)
KEYS = ("train.steps=9", "checkpoint.every=3", "log.every=2", "parallel.replicas=1", "parallel.shards=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mirror")
    write_texts(folder)
    return folder


def mirrored(folder: Path, name: str, *overrides: str) -> Recipe:
    return recipe_of(folder, name, *KEYS, f"checkpoint.mirror={folder / 'there'}", *overrides)


def steps_of(run: Path) -> list[int]:
    return list(complete_checkpoints(run / "checkpoints"))


def opened_and_finished(recipe: Recipe, step: int | None) -> tuple[str, str | None]:
    """Open a mirror, copy the checkpoint of `step` to it if given, and return this rank's errors of both."""
    mesh = mesh_of(2, 1)
    mirror = Mirror(recipe, RunDirectory(recipe), lambda text: None, mesh.is_main)
    try:
        mirror.open(mesh)
        mirror.claim(mesh)
    except RecipeError as error:
        return str(error), None
    if step is not None:
        mirror.after_checkpoint(step)
    return "", mirror.finish(mesh)


def test_every_rank_hears_of_what_goes_wrong(ranks: RankPool, folder: Path) -> None:
    recipe = mirrored(folder, "two")
    assert ranks.run(opened_and_finished, recipe, None, world_size=2) == [("", None), ("", None)]
    first, second = ranks.run(opened_and_finished, mirrored(folder, "two", "optim.lr=0.5"), None, world_size=2)
    assert first == second and "there/two holds a run of another recipe (optim.lr: 0.003 there, 0.5 here)" in first[0]
    unknown = recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update={"mirror": "nosuch://a"})})
    first, second = ranks.run(opened_and_finished, unknown, None, world_size=2)
    assert first == second and first[0].startswith("checkpoint.mirror: nosuch://a/two: Protocol not known: nosuch; ")
    first, second = ranks.run(opened_and_finished, recipe, 3, world_size=2)  # step 3 has no checkpoint
    assert first == second and first[1].startswith(f"step 3 could not be copied to {folder / 'there'}/two: ")


def test_a_run_whose_last_checkpoint_is_not_copied_has_failed_until_it_is(folder: Path) -> None:
    recipe, there = mirrored(folder, "late"), folder / "there/late/checkpoints"

    def obstruct(trainer: Trainer) -> None:
        there.write_text("a file in the way")

    with pytest.raises(
        TrainingError, match=r"step 9 could not be copied to .*; it is complete in .*, start the same command"
    ):
        run_training(recipe, ALONE, obstruct)
    run = RunDirectory(recipe)
    assert run.summary()["stopped"] == "error" and steps_of(run.path) == [3, 6, 9]
    lines = exact_lines(run.path)
    assert load_recipe(there.parent / "recipe.yaml") == recipe
    there.unlink()
    assert run_training(recipe, ALONE) == DONE
    assert run.summary()["mirrored"] == 9 and exact_lines(run.path) == lines
    assert (there / "step-00000009/state.json").is_file()


def test_a_start_that_fails_before_training_leaves_the_mirror_to_a_corrected_recipe(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RecipeError("the model can't be built")

    monkeypatch.setattr("llmtrain.train.run.build_trainer", fail)
    for overrides in ((), ("optim.lr=0.5",)):
        with pytest.raises(RecipeError, match=r"^the model can't be built"):
            run_training(mirrored(folder, "failed", *overrides), ALONE)
    assert list((folder / "there/failed").iterdir()) == []


def test_a_run_that_was_asked_to_stop_only_says_what_is_not_copied(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, there = mirrored(folder, "stopped"), folder / "there/stopped/checkpoints"

    def obstruct_and_stop(trainer: Trainer) -> None:
        there.write_text("a file in the way")
        trainer.metrics.stop.requested = True

    assert run_training(recipe, ALONE, obstruct_and_stop) == STOPPED_EARLY
    said = capsys.readouterr().out
    assert "could not be copied to" in said and "start the same command again to continue" in said.splitlines()[-1]
    there.unlink()
    assert run_training(recipe, ALONE) == DONE
    capsys.readouterr()
    assert run_training(recipe, ALONE) == DONE
    run = RunDirectory(recipe)
    assert capsys.readouterr().out.strip() == run.completed_message(), "nothing else is printed"


def test_without_a_mirror_the_damage_of_the_disks_checkpoints_is_the_error(folder: Path) -> None:
    recipe = recipe_of(folder, "alone", *KEYS)
    assert run_training(recipe, ALONE) == DONE
    run = RunDirectory(recipe)
    (run.path / "summary.json").unlink()
    for path in run.checkpoints.glob("step-*"):
        flip(path / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"runs/alone/checkpoints/step-00000003 is damaged: __0_0.distcp"):
        run_training(recipe, ALONE)
    assert steps_of(run.path) == [3, 6, 9]


def test_damaged_checkpoints_are_fetched_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = mirrored(folder, "damaged")
    run, there = RunDirectory(recipe), folder / "there/damaged"
    assert run_training(recipe, ALONE) == DONE
    lines = exact_lines(run.path)
    for damaged, of_mirror, newest in (([9], [], 9), ([3, 6, 9], [9], 6)):
        (run.path / "summary.json").unlink()
        for step in damaged:
            flip(run.checkpoints / f"step-{step:08d}/__0_0.distcp")
        for step in of_mirror:
            flip(there / f"checkpoints/step-{step:08d}/__0_0.distcp")
        capsys.readouterr()
        assert run_training(recipe, ALONE) == DONE
        said = capsys.readouterr().out
        assert f"fetched {there}/checkpoints/step-{newest:08d}\n" in said
        assert said.count("is damaged: __0_0.distcp is not what was written") == len(damaged) + len(of_mirror)
        assert f"continuing from {run.checkpoints}/step-{newest:08d}\n" in said
        assert exact_lines(run.path) == lines and steps_of(run.path) == [3, 6, 9]
    assert RemoteRun(str(there)).complete() == [3, 6, 9]

    (run.path / "summary.json").unlink()
    for place in (run.path, there):
        for path in place.glob("checkpoints/step-*"):
            os.truncate(path / "__0_0.distcp", 100)
    with pytest.raises(
        CheckpointError,
        match=r"there/damaged/checkpoints/step-00000003 is damaged: .* none of the 3 checkpoints is valid; restore one",
    ):
        run_training(recipe, ALONE)
    shutil.rmtree(run.path)
    shutil.rmtree(there)
    assert run_training(recipe, ALONE) == DONE and exact_lines(run.path) == lines
