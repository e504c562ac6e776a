"""Tests of a run that started from weights and is continued from its mirror after both its folder and the weights are lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from llmtrain.config import Recipe
from llmtrain.errors import UserError
from llmtrain.recipe_loader import load_recipe
from llmtrain.run_files import RECIPE
from llmtrain.train.mirror import RemoteRun
from tests.unit.test_pretrained import save


@pytest.fixture
def started(tmp_path: Path) -> list[str]:
    """Provide the keys of a run that started from weights. It has a mirror, but the weights do not exist any more."""
    weights = save(tmp_path / "weights")
    keys = [
        f"run.out_dir={tmp_path}/runs",
        f"model.from_weights={weights}",
        f"checkpoint.mirror=file://{tmp_path}/copies",
    ]
    RemoteRun(f"file://{tmp_path}/copies/mine").write_recipe(recipe_of(tmp_path, keys))
    shutil.rmtree(weights)
    return keys


def recipe_of(folder: Path, keys: list[str]) -> Recipe:
    (folder / "mine.yaml").write_text("")
    return load_recipe(folder / "mine.yaml", keys)


def test_the_architecture_is_that_in_the_mirror(tmp_path: Path, started: list[str]) -> None:
    recipe = recipe_of(tmp_path, started)
    assert recipe.model.config["hidden_size"] == 8
    assert recipe == load_recipe(tmp_path / "copies/mine" / RECIPE)


@pytest.mark.parametrize("changed", ["run.name=other", "model.from_weights=/other", "checkpoint.mirror=none://there"])
def test_weights_that_no_run_started_from_are_missed(tmp_path: Path, started: list[str], changed: str) -> None:
    with pytest.raises(UserError, match=r"^model\.from_weights: "):
        recipe_of(tmp_path, [*started, changed])
