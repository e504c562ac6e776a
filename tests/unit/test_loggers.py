"""Weights & Biases: what a run leaves, and what is said where it cannot."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtrain import recipe_check
from llmtrain.config import Recipe
from llmtrain.errors import RecipeError
from llmtrain.recipe_loader import load_recipe
from llmtrain.train.loggers import JsonlLogger, TensorBoardLogger, WandbLogger, open_loggers
from llmtrain.train.run_dir import RunDirectory

ROOT = Path(__file__).parents[2]
OFFLINE = "log.wandb={project: across, mode: offline}"


def recipe_in(folder: Path, *overrides: str) -> Recipe:
    return load_recipe(ROOT / "recipes/quickstart.yaml", [f"run.out_dir={folder}", "run.name=a", *overrides])


def log_two_lines(recipe: Recipe, resumed_step: int) -> list[Path]:
    """Returns the files of Weights & Biases."""
    directory = RunDirectory(recipe)
    directory.path.mkdir(exist_ok=True)
    logger = WandbLogger(recipe, directory, resumed_step)
    for step in (resumed_step + 1, resumed_step + 2):
        logger.log(step, 100 * step, 0.5, {"train/loss": 4.0})
    logger.close()
    return sorted((directory.path / "wandb").glob("offline-run-*/*.wandb"))


def test_an_offline_run_holds_its_recipe_and_its_lines_and_keeps_its_id(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, OFFLINE)
    [first] = log_two_lines(recipe, 0)
    content = first.read_bytes()
    assert b"train/loss" in content and b"across" in content and b"sequence_length" in content
    assert {path.name for path in log_two_lines(recipe, 2)} == {first.name}, "wandb sync makes one run of both"
    assert len({path.name for path in log_two_lines(recipe, 0)}) == 2, "begun again, it is another run"


def test_loggers_are_those_of_the_recipe(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path)
    directory = RunDirectory(recipe)
    directory.path.mkdir()
    loggers = open_loggers(recipe, directory, 0)
    assert [type(logger) for logger in loggers] == [JsonlLogger, TensorBoardLogger]
    for logger in loggers:
        logger.log(1, 10, 0.1, {"train/loss": 1.0})
        logger.close()


def test_a_server_that_refuses_is_an_error_of_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(Exception):
        pass

    def init(**given: object) -> None:
        raise Refused("No API key configured.\nUse `wandb login`")

    fake = SimpleNamespace(Error=Refused, init=init, Settings=lambda **given: given)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(
        OSError, match=r"^log.wandb: No API key configured. Use `wandb login`; .* log.wandb.mode=offline$"
    ):
        log_two_lines(recipe_in(tmp_path, "log.wandb={project: p}"), 0)


def test_without_the_package_a_recipe_that_wants_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find_spec(name))
    with pytest.raises(
        RecipeError, match=r"^log.wandb is given, but wandb is not installed; pip install wandb, or log"
    ):
        recipe_check.check(recipe_in(tmp_path, OFFLINE), None)
    recipe_check.check(recipe_in(tmp_path), None)
