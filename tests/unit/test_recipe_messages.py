"""Names of files in messages about wrong values of recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.errors import RecipeError
from llmtrain.recipe_loader import load_recipe
from tests.unit.test_recipe_check import written
from tests.unit.test_recipe_wrong import assert_one_line_with, refusal


def test_the_last_place_that_gave_a_wrong_value_is_named(tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text("optim: {lr: slow}")
    with pytest.raises(RecipeError, match=r"recipe\.yaml: optim\.lr is \"fast\""):
        load_recipe(written(tmp_path, "base: below.yaml\noptim: {lr: fast}"))


@pytest.mark.parametrize(
    ("child", "message"),
    [
        ("data: {'sources[2]': {weight: 3}}", "data.sources[2] is not a key"),
        ("data: {'sources[x]': {weight: 3}}", "data.sources[x] is not a key"),
        ("train: {steps: 5, 'steps[0]': 6}", "train.steps[0] is not a key"),
    ],
)
def test_a_key_that_looks_like_an_entry_is_blamed_on_the_file_that_has_it(
    tmp_path: Path, child: str, message: str
) -> None:
    (tmp_path / "below.yaml").write_text("data: {sources: [{source: a}, {source: b}]}\ntrain: {steps: 5}")
    with pytest.raises(RecipeError) as caught:
        load_recipe(written(tmp_path, f"base: below.yaml\n{child}"))
    assert message in str(caught.value) and "recipe.yaml: " in str(caught.value)


def test_message_names_the_file_that_gave_the_value(tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text("optim: {lr: fast}")
    (tmp_path / "above.yaml").write_text("base: below.yaml\noptim: {eps: 1e-8}")
    assert_one_line_with(refusal(tmp_path / "above.yaml"), ["below.yaml: optim.lr is"])


def test_file_name_that_is_no_run_name_is_blamed_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "my recipe.yaml"
    path.write_text("train: {steps: 3}")
    blamed = "my recipe.yaml (the run takes its name, because run.name is not given): run.name is"
    assert_one_line_with(refusal(path), [f'{blamed} "my recipe"', "letters, digits"])


def test_a_name_that_yaml_reads_as_a_number_is_wanted_in_quotes_where_its_text_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text("run: {<<: &other {name: 010}, seed: 1}")
    assert_one_line_with(refusal(path), ["merged.yaml: run.name is 8, a number; put the name in quotes"])
