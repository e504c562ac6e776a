"""Tests of runs that continue with another number of steps than they began with, by every method, and of refusals."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from llmtrain.config import Recipe
from llmtrain.errors import DONE, STOPPED_EARLY, RecipeError
from llmtrain.launch.preflight import check_here
from llmtrain.lr import LRSchedule
from llmtrain.parallel.world import World
from llmtrain.run_files import complete_checkpoints
from llmtrain.train.checkpoint_files import read_state
from llmtrain.train.checkpoint_reader import FullTensorReader
from llmtrain.train.run import run_training
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.trainer import Trainer
from tests.distributed.pool import RankPool
from tests.distributed.reshard_runs import recipe_of, write_texts
from tests.distributed.stored_runs import KEYS, train
from tests.end_to_end.runs import exact_lines, lines_of

ALONE = World(0, 1, 0, 1)
FIRST, SECOND, CHECKPOINT = 7, 20, 14
"""Steps of the run at first and when it continues, and a checkpoint of the second part. Step 7 is within a round. With
20 steps, the learning rate is above half of its peak until step 11."""
PER_STEP = 12 * 32
SETTINGS = ("log.every=2", "eval.every=5", f"checkpoint.every={CHECKPOINT}", "sync.warmup_steps=2")
OLD_PERIOD = {"post_local_sgd": 4}
"""Synchronous steps that follow from the learning rate of the run's first length. Other methods have two."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("length")
    write_texts(folder)
    return folder


def replicas_are_equal(checkpoint: Path) -> bool:
    stored = FullTensorReader(checkpoint, "", "")
    names = stored.shapes("replica0.weights.")
    assert names
    first, second = (
        {name: stored.read_full_tensor(f"{replica}.weights.{name}") for name in names}
        for replica in ("replica0", "replica1")
    )
    return all(first[name].equal(second[name]) for name in names)


FAST = ("streaming_diloco", "wagma", "a_edit")
"""Methods with a rule of their own for runs that become longer."""


@pytest.mark.parametrize(
    "method", [pytest.param(method, marks=() if method in FAST else pytest.mark.deep) for method in KEYS]
)
def test_a_finished_run_continues_for_longer(ranks: RankPool, folder: Path, method: str) -> None:
    name, keys = f"longer-{method}", (f"sync.method={method}", *KEYS[method], *SETTINGS)
    recipes = [recipe_of(folder, name, *keys, f"train.steps={steps}") for steps in (FIRST, SECOND)]
    directory = RunDirectory(recipes[0])
    for recipe in recipes:
        assert ranks.run(train, recipe, (2, 1), None, world_size=2) == ["done", "done"]
    lines, rates = [line for line in lines_of(directory.path) if "train/loss" in line], [*map(LRSchedule.of, recipes)]
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps)) and steps[-1] >= SECOND and FIRST in steps
    if method != "palsgd":  # PALSGD's pulls read no data
        assert [line["tokens"] // PER_STEP for line in lines] == steps
    if method != "a_edit":  # A-EDiT's replicas have steps of their own
        assert steps[-1] == SECOND
        for line in lines:
            assert line["train/lr"] == rates[line["step"] > FIRST].at(line["step"])
    *_, final = complete_checkpoints(directory.checkpoints).values()
    if method != "synchronous":
        counts = {line["step"]: line["sync/count"] for line in lines}
        assert counts[steps[-1]] > counts[FIRST] >= 1
        assert all(line["sync/period"] > 0 for line in lines if line["step"] > FIRST), "local steps stay local"
        assert read_state(final)["ranks"][0]["method"]["period"]["warmup"] == OLD_PERIOD.get(method, 2)
    assert replicas_are_equal(final)
    if method in ("post_local_sgd", "qsr", "streaming_diloco", "co2", "wagma"):
        before = exact_lines(directory.path)
        shutil.rmtree(final)
        assert ranks.run(train, recipes[1], (2, 1), None, world_size=2) == ["done", "done"]
        assert exact_lines(directory.path) == before, "with its new length, it resumes exactly"


@pytest.mark.parametrize("method", ["post_local_sgd", "wagma"])
def test_local_steps_begin_where_a_run_that_is_cut_short_continues(ranks: RankPool, folder: Path, method: str) -> None:
    """By the learning rate of 40 steps, local steps begin after step 21. By that of 13 steps, they would have begun
    after step 7, so they begin where the run continues, after step 10."""
    keys = (f"sync.method={method}", *KEYS[method], *SETTINGS, "sync.warmup_until_lr=0.5")
    recipes = [recipe_of(folder, f"cut-{method}", *keys, f"train.steps={steps}") for steps in (40, 13)]
    assert ranks.run(train, recipes[0], (2, 1), 8, world_size=2) == ["signal", "signal"]
    assert ranks.run(train, recipes[1], (2, 1), None, world_size=2) == ["done", "done"]
    (begun, _), (end, final) = complete_checkpoints(RunDirectory(recipes[0]).checkpoints).items()
    assert (begun, end) == (10, 13)
    assert read_state(final)["ranks"][0]["method"]["period"]["warmup"] == 10
    assert replicas_are_equal(final)


def test_local_steps_begin_where_a_run_continues_with_another_batch_and_rate(ranks: RankPool, folder: Path) -> None:
    """By the first schedule, local steps begin after step 21. By the second, they would have begun after step 8, so
    they begin where the run continues, after step 10."""
    keys = (
        "sync.method=post_local_sgd",
        *KEYS["post_local_sgd"],
        *SETTINGS,
        "sync.warmup_until_lr=0.5",
        "train.steps=40",
    )
    later = ("train.global_batch=24", "schedule={kind: step, decay_at: [0.2]}")
    recipes = [recipe_of(folder, "other-batch", *keys, *more) for more in ((), later)]
    for recipe, until in zip(recipes, (8, 12), strict=True):
        assert ranks.run(train, recipe, (2, 1), until, world_size=2) == ["signal", "signal"]
    (begun, _), (_, final) = complete_checkpoints(RunDirectory(recipes[0]).checkpoints).items()
    assert read_state(final)["ranks"][0]["method"]["period"]["warmup"] == begun == 10


def alone(folder: Path, name: str, *keys: str) -> Recipe:
    return recipe_of(folder, name, "parallel.replicas=1", "parallel.shards=1", "train.micro_batch=12", *SETTINGS, *keys)


def test_a_finished_run_says_how_it_is_continued(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = folder / "runs/asked"
    assert run_training(alone(folder, "asked", "train.steps=6"), ALONE) == DONE
    capsys.readouterr()
    assert run_training(alone(folder, "asked", "train.steps=6"), ALONE) == DONE
    said = capsys.readouterr().out
    assert "is complete: 6 steps" in said and "train.steps=12" in said and said.count("\n") == 1
    with pytest.raises(RecipeError) as refused:
        run_training(alone(folder, "asked", "train.steps=5"), ALONE)
    assert str(refused.value).startswith(f"train.steps is 5, but {at} has trained 6 steps already; give more")
    same_in_tokens = ("train.steps=null", f"train.tokens={6 * PER_STEP + 7}")
    assert run_training(alone(folder, "asked", *same_in_tokens), ALONE) == DONE
    assert "is complete: 6 steps" in capsys.readouterr().out
    more = ("train.steps=null", f"train.tokens={10 * PER_STEP}")
    warned = [
        len(check_here(alone(folder, "asked", *keys), per_node=1).warnings) for keys in (("train.steps=6",), more)
    ]
    assert warned[1] == warned[0] + 1, "recipe check warns that the learning rate jumps"
    assert run_training(alone(folder, "asked", *more), ALONE) == DONE
    said = capsys.readouterr().out
    assert f"continuing from {at}/checkpoints/step-00000006, for 10 steps instead of 6\n" in said
    assert said.count("warning: learning rate: from 0.0003 in step 6 to ") == 1
    assert RunDirectory(alone(folder, "asked", *more)).summary()["steps"] == 10
    evaluated = [line["step"] for line in lines_of(at) if "eval/loss" in line]
    assert evaluated == [0, 5, 6, 10], "the lines of the first part are kept"
    with pytest.raises(RecipeError, match=rf"train.tokens is {8 * PER_STEP} \(8 steps\), but .* has trained 10 steps"):
        run_training(alone(folder, "asked", "train.steps=null", f"train.tokens={8 * PER_STEP}"), ALONE)


def test_the_rate_may_be_chosen_with_the_length_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_training(alone(folder, "rate", "train.steps=4"), ALONE) == DONE
    smooth = ("schedule.kind=constant", "optim.lr=3e-4")
    with pytest.raises(RecipeError, match=r"optim.lr: 0.003 there, 0.0003 here"):
        run_training(alone(folder, "rate", "train.steps=4", *smooth), ALONE)
    capsys.readouterr()
    assert run_training(alone(folder, "rate", "train.steps=6", *smooth), ALONE) == DONE
    assert "learning rate: from" not in capsys.readouterr().out
    assert [line["train/lr"] for line in lines_of(folder / "runs/rate") if line.get("train/lr")][-1] == 3e-4


def test_a_stopped_run_may_become_shorter_but_not_end_within_its_round(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ("log.every=1", "sync.warmup_steps=1")

    def stop_at_once(trainer: Trainer) -> None:
        trainer.metrics.stop.requested = True

    assert run_training(alone(folder, "shorter", "train.steps=20", *keys), ALONE, stop_at_once) == STOPPED_EARLY
    [(step, path)] = complete_checkpoints(folder / "runs/shorter/checkpoints").items()
    assert step == 2
    with pytest.raises(RecipeError, match=r"train.steps is 2, but .*shorter has trained 2 steps already"):
        run_training(alone(folder, "shorter", f"train.steps={step}", *keys), ALONE)
    capsys.readouterr()
    assert run_training(alone(folder, "shorter", "train.steps=5", *keys), ALONE) == DONE
    assert f"continuing from {path}, for 5 steps instead of 20\n" in capsys.readouterr().out


def test_with_wsd_a_run_may_decay_at_any_step_and_jumps_only_after_that(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is stopped after step 2, ends with a decay over three of five steps, and then continues from there."""
    keys = ("log.every=1", "sync.warmup_steps=1", "schedule={kind: wsd, warmup_steps: 1, decay_fraction: 0.6}")

    def stop_at_once(trainer: Trainer) -> None:
        trainer.metrics.stop.requested = True

    assert run_training(alone(folder, "open", "train.steps=1000", *keys), ALONE, stop_at_once) == STOPPED_EARLY
    assert run_training(alone(folder, "open", "train.steps=5", *keys), ALONE) == DONE
    assert "learning rate: from" not in capsys.readouterr().out
    assert run_training(alone(folder, "open", "train.steps=10", *keys), ALONE) == DONE
    output = capsys.readouterr().out
    assert (
        "warning: learning rate: from 0.0003 in step 5 to 0.0021 in step 6, because schedule.kind=wsd now spans"
        in output
    )
    assert "from a checkpoint of step 2 or before, it would not jump" in output
    rates = [line["train/lr"] for line in lines_of(folder / "runs/open") if "train/loss" in line]
    shares = [1, 1, 0.7, 0.4, 0.1, 0.7, 0.55, 0.4, 0.25, 0.1]
    assert rates == pytest.approx([3e-3 * share for share in shares])


def test_a_finished_run_is_extended_from_the_newest_checkpoint_that_can_be_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ("checkpoint.every=2", "checkpoint.keep=3")
    assert run_training(alone(folder, "cut_off", "train.steps=4", *keys), ALONE) == DONE
    *_, older, newest = complete_checkpoints(folder / "runs/cut_off/checkpoints").values()
    (newest / "state.json").write_text("{")
    capsys.readouterr()
    assert run_training(alone(folder, "cut_off", "train.steps=6", *keys), ALONE) == DONE
    assert f"continuing from {older}, for 6 steps instead of 4\n" in capsys.readouterr().out


def test_a_finished_run_without_checkpoints_does_not_begin_anew(folder: Path) -> None:
    assert run_training(alone(folder, "deleted", "train.steps=4"), ALONE) == DONE
    shutil.rmtree(folder / "runs/deleted/checkpoints")
    assert run_training(alone(folder, "deleted", "train.steps=4"), ALONE) == DONE
    with pytest.raises(RecipeError, match=r"deleted is complete after 4 steps, but has no checkpoint to continue"):
        run_training(alone(folder, "deleted", "train.steps=8"), ALONE)
    with pytest.raises(RecipeError, match=r"train.steps is 3, but .*deleted has trained 4 steps already"):
        run_training(alone(folder, "deleted", "train.steps=3"), ALONE)
    assert len(lines_of(folder / "runs/deleted")) > 2
