"""Every recipe of the repository can be trained as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from llmtrain.errors import RecipeError
from llmtrain.recipe import load_recipe, resolved_yaml
from llmtrain.recipe_check import check

ROOT = Path(__file__).parents[2] / "recipes"
BASES = sorted((ROOT / "base").glob("*.yaml"))
RECIPES = sorted(path for path in ROOT.rglob("*.yaml") if path not in BASES)


def of(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


def bases_of(path: Path) -> set[Path]:
    """The base files that a recipe names, and those that they name."""
    named = yaml.safe_load(path.read_text()).get("base") or []
    direct = {(path.parent / name).resolve() for name in ([named] if isinstance(named, str) else named)}
    return direct.union(*(bases_of(base) for base in direct))


def test_there_are_recipes() -> None:
    assert RECIPES and BASES


@of(RECIPES)
def test_recipe_checks(path: Path) -> None:
    recipe = load_recipe(path)
    check(recipe, None)
    assert recipe.run.name == path.stem


@of(RECIPES)
def test_recipe_reads_back_the_same(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(resolved_yaml(recipe))
    assert load_recipe(resolved) == recipe


@of(RECIPES + BASES)
def test_recipe_begins_with_a_comment_that_says_what_it_is(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first.startswith("# ") and len(first) > 20, f"{path}: first line is {first!r}"


@of(BASES)
def test_base_is_no_recipe_of_its_own(path: Path) -> None:
    with pytest.raises(RecipeError, match=r"train\.steps and train\.tokens: neither is given"):
        check(load_recipe(path), None)


@of(BASES)
def test_base_is_used(path: Path) -> None:
    assert any(path.resolve() in bases_of(recipe) for recipe in RECIPES)
