"""Every recipe of the repository can be trained as it stands, and those that are to be compared differ in their method."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from llmtrain.config import EverySteps
from llmtrain.recipe import differences, load_recipe, resolved_yaml
from llmtrain.recipe_check import check
from llmtrain.sync.methods import METHODS

ROOT = Path(__file__).parents[2] / "recipes"
BASES = sorted((ROOT / "base").glob("*.yaml"))
COMPARISONS = sorted((ROOT / "compare").glob("*.yaml"))  # tests/unit/test_comparison.py reads those
RECIPES = sorted(path for path in ROOT.rglob("*.yaml") if path not in [*BASES, *COMPARISONS])

GPT_NEO = ("gpt_neo_8m", "gpt_neo_125m")
ON_1B = ("synchronous", "local_sgd", "diloco", "streaming_diloco", "co2", "palsgd", "edit", "a_edit")
COMPARED = [(method, model) for model in GPT_NEO for method in METHODS] + [(method, "1b") for method in ON_1B]
"""(method, model) of the recipes that are comparisons of methods: `<method>_<model>.yaml`."""
PROCESSES = {"gpt_neo_8m": 4, "gpt_neo_125m": 4, "1b": 64}
MAY_DIFFER = ("run.name", "sync")
"""Keys in which recipes that are compared may differ."""
OWN_ROUND = {"wagma"}
"""Methods with rounds of a fixed length that is part of the method, and not the comparison's."""


def of(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


compared = pytest.mark.parametrize(("method", "model"), COMPARED, ids=[f"{m}_{model}" for m, model in COMPARED])


def bases_of(path: Path) -> set[Path]:
    """The base files that a recipe names, and those that they name."""
    named = yaml.safe_load(path.read_text()).get("base") or []
    direct = {(path.parent / name).resolve() for name in ([named] if isinstance(named, str) else named)}
    return direct.union(*(bases_of(base) for base in direct))


def header_of(path: Path) -> list[str]:
    """The comment lines that a file begins with, without their sign."""
    lines = path.read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("# "))
    return [line.removeprefix("# ") for line in lines[:end]]


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
    header = header_of(path)
    assert header and len(header[0]) > 20, f"{path}: the header is {header}"


@of(RECIPES)
def test_recipe_says_where_its_values_come_from(path: Path) -> None:
    assert len(header_of(path)) > 1, f"{path}: the header has one line; say what is a paper's, recalled or chosen"


@of([path for path in RECIPES if " B tokens" in header_of(path)[0]])
def test_header_has_the_recipes_tokens(path: Path) -> None:
    billions = re.search(r"([\d.]+) B tokens", header_of(path)[0])
    assert float(billions[1]) * 1e9 == load_recipe(path).train.tokens


@of(BASES)
def test_base_says_nothing_of_one_run(path: Path) -> None:
    # A `sync` section would bring choices of one method into the recipes of another.
    assert not {"run", "sync"} & yaml.safe_load(path.read_text()).keys()


@of(BASES)
def test_base_is_used(path: Path) -> None:
    assert any(path.resolve() in bases_of(recipe) for recipe in RECIPES)


@compared
def test_method_has_its_recipe(method: str, model: str) -> None:
    recipe = load_recipe(ROOT / f"{method}_{model}.yaml")
    assert recipe.sync.method == method
    check(recipe, PROCESSES[model])


@pytest.mark.parametrize("model", PROCESSES)
def test_all_recipes_of_a_model_are_compared(model: str) -> None:
    assert {path.stem for path in ROOT.glob(f"*_{model}.yaml")} == {
        f"{m}_{model}" for m, its in COMPARED if its == model
    }


@compared
def test_compared_recipes_differ_in_their_method_alone(method: str, model: str) -> None:
    baseline = load_recipe(ROOT / f"synchronous_{model}.yaml")
    assert differences(baseline, load_recipe(ROOT / f"{method}_{model}.yaml"), ignore=MAY_DIFFER) == []


@pytest.mark.parametrize("model", GPT_NEO)
def test_rounds_of_a_fixed_length_are_equally_long(model: str) -> None:
    sections = [load_recipe(ROOT / f"{method}_{model}.yaml").sync for method in METHODS if method not in OWN_ROUND]
    assert len({sync.period.every for sync in sections if isinstance(sync.period, EverySteps)}) == 1


@pytest.mark.parametrize("model", GPT_NEO)
def test_local_steps_begin_at_the_same_step(model: str) -> None:
    sections = [load_recipe(ROOT / f"{method}_{model}.yaml").sync for method in METHODS]
    local = [sync for sync in sections if sync.period.kind != "every_step" and sync.warmup_until_lr is None]
    assert len({sync.warmup_steps for sync in local}) == 1
