"""Tests of the checks before a comparison's first trial that concern restarts with another batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmtrain.compare import runner
from llmtrain.compare.comparison import load_comparison, trials
from llmtrain.errors import RecipeError
from llmtrain.recipe_loader import load_recipe, resolved_yaml
from tests.unit.test_compare_runner import ROOT
from tests.unit.test_comparison import written

ELASTIC = f"""
recipe: {ROOT}/recipes/edit_llama_stdlib.yaml
overrides: [parallel.shards=1, train.steps=60]
hosts: {{count: 2}}
runs:
  elastic: {{replicas: 1, restarts: [{{after_step: 20, replicas: 2, global_batch: 64}}, {{after_step: 40, replicas: 1}}]}}
"""


def test_the_batches_of_restarts_are_checked_and_their_text_prepared_before_the_first_trial(tmp_path: Path) -> None:
    file = written(tmp_path, ELASTIC)
    (planned,) = trials(comparison := load_comparison(file), file)
    assert runner._checked(planned, comparison).train.global_batch == 32
    assert runner._with_largest_batch(planned).train.global_batch == 64
    file = written(tmp_path, ELASTIC.replace("train.steps=60", "train.steps=60, data.packing=none"))
    (planned,) = trials(comparison := load_comparison(file), file)
    with pytest.raises(
        RecipeError, match=r"elastic: the restart with train.global_batch=64 is not possible; with data.packing"
    ):
        runner._checked(planned, comparison)


@pytest.mark.parametrize(
    ("recorded", "here", "found"),
    [
        ({"global_batch": 32}, 32, []),
        ({"global_batch": 32}, 16, ["train.global_batch: 32 there, 16 here"]),
        ({}, 16, []),
    ],
    ids=["the same", "another", "written by an earlier version"],
)
def test_the_batch_at_the_start_of_an_ended_trial_is_compared_though_a_restart_changes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: dict[str, int], here: int, found: list[str]
) -> None:
    """The recipe that the trial leaves has the batch of its last stage."""
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path, ELASTIC)
    (planned,) = trials(comparison := load_comparison(file), file)
    planned.directory.mkdir(parents=True)
    stored = load_recipe(planned.recipe, planned.overrides_of(planned.stages[-1]))
    assert stored.train.global_batch == 64
    (planned.directory / "recipe.yaml").write_text(resolved_yaml(stored))
    (planned.directory / "trial.json").write_text(json.dumps({"state": "done", **recorded}))
    recipe = load_recipe(planned.recipe, (*planned.overrides, f"train.global_batch={here}"))
    assert runner._differences(planned, recipe, comparison, True) == found


def test_a_comparison_from_before_restarts_had_batches_is_the_same_one(tmp_path: Path) -> None:
    file = written(tmp_path, ELASTIC.replace(", global_batch: 64", ""))
    comparison = load_comparison(file)
    stored = resolved_yaml(comparison)
    assert stored.count("global_batch: null") == 2
    (tmp_path / "comparison.yaml").write_text(stored.replace("global_batch: null", ""))
    runner._check_folder(tmp_path, comparison)
    with pytest.raises(RecipeError, match=r"another version of this comparison \(global_batch: 64 here\)"):
        runner._check_folder(tmp_path, load_comparison(written(tmp_path, ELASTIC)))
