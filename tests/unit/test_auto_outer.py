"""Tests of outer steps in short runs: the choice of `sync.outer: auto`, and the warning about too early momentum."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llmtrain.config import NesterovSection, Recipe
from llmtrain.errors import RecipeError
from llmtrain.plan.recipe_warnings import recipe_warnings
from llmtrain.recipe_loader import load_recipe, resolved_yaml
from llmtrain.sync.auto_outer import outer_for

RECIPE = "recipes/edit_llama_stdlib.yaml"
SHORT = ["sync.warmup_steps=0", "sync.period=5"]


def of_early_momentum(recipe: Recipe) -> list[str]:
    """Return the warnings about outer momentum that starts too early."""
    return [line for line in recipe_warnings(recipe) if line.startswith("sync.outer.momentum is")]


@pytest.mark.parametrize("method", ["diloco", "edit", "palsgd"])
@pytest.mark.parametrize(
    ("changed", "rounds"),
    [
        (["train.steps=35"], 7),
        (["train.steps=35", "sync.outer.momentum=0.5"], None),
        (["train.steps=35", "sync.outer.rounds.momentum_warmup=1"], None),
        (["train.steps=35", "parallel.replicas=1"], None),
        (["train.steps=9"], 2),  # the second round is shorter
        (["train.steps=5"], None),  # in the first round, there is no momentum yet
        (["train.steps=155"], None),
        (["train.steps=155", "sync.warmup_steps=5"], 30),
        (["train.steps=35", "optim.kind=muon"], None),
        (["train.steps=300", "sync.period={kind: qsr, base: 5, alpha: 0.008}"], 20),  # QSR's rounds grow
        (["train.steps=35", "sync.outer.lr=0.4"], None),
        (["train.steps=35", "sync.outer=auto"], None),
    ],
    ids=str,
)
def test_outer_momentum_from_the_first_round_of_a_short_run_is_a_warning(
    method: str, changed: Sequence[str], rounds: int | None
) -> None:
    own = ["sync.outer.rounds.momentum_warmup=0"] if method == "edit" else []  # the recipe warms it up
    keys = [f"sync.method={method}", *own, *SHORT, "schedule.warmup_steps=1"]
    warnings = of_early_momentum(load_recipe(RECIPE, [*keys, *changed]))
    assert len(warnings) == (rounds is not None)
    if rounds is not None:
        assert f"first of {rounds} rounds" in warnings[0]
        assert ("with sync.outer=auto or sync.outer.rounds" in warnings[0]) == (rounds >= 13)
        advice = warnings[0].rpartition(" ")[2]
        assert not of_early_momentum(load_recipe(RECIPE, [*keys, *changed, advice]))


def test_rounds_of_seconds_are_counted_if_the_time_of_a_step_is_known() -> None:
    clock = ["parallel.in_process=true", "parallel.replicas=2", "parallel.virtual_clock.step_seconds=[1.0, 1.0]"]
    keys = [
        "sync.method=a_edit",
        "sync.period.every=4",
        "sync.period.min_steps=2",
        "sync.warmup_steps=4",
        "train.steps=24",
    ]
    (line,) = of_early_momentum(load_recipe(RECIPE, [*keys, *clock, "schedule.warmup_steps=1"]))
    assert "first of about 5 rounds" in line


def test_a_run_without_outer_momentum_or_counted_rounds_has_no_such_warning() -> None:
    for method in ("local_sgd", "slowmo", "a_edit"):
        assert not of_early_momentum(load_recipe(RECIPE, [f"sync.method={method}", "sync.period.every=9"])), method
    assert not of_early_momentum(load_recipe(RECIPE, ["sync.method=synchronous", "sync.period=every_step"]))


def test_the_rule_has_the_best_step_of_the_study_and_that_of_averaging() -> None:
    study, averaging = outer_for(26, 30), outer_for(4, 1)
    assert (study.lr, study.momentum, study.rounds.momentum_warmup) == (0.7, 0.81, 4)
    assert (averaging.lr, averaging.momentum) == (1.0, 0.0)
    assert outer_for(26, 10).momentum == 0.42
    assert outer_for(1000, 500).momentum == 0.9
    assert outer_for(260, 3).momentum == 0.0
    steps = [outer_for(rounds, steps) for rounds in range(1, 200, 7) for steps in (1, 10, 30, 500)]
    assert all(0 <= one.momentum <= 0.9 and 0.66 <= one.lr <= 1.0 for one in steps)
    momenta = [outer_for(rounds, 20).momentum for rounds in range(1, 200)]
    assert momenta == sorted(momenta)


@pytest.mark.parametrize(
    ("keys", "rounds", "length"),
    [
        (["train.steps=400", "sync.warmup_steps=100", "sync.period=10"], 30, 10),
        (["sync.warmup_steps=0", "sync.period=40"], 8, 37.5),  # the last round is shorter
        (["sync.method=qsr", "sync.period.alpha=1e-9", "sync.period.base=6", "sync.warmup_steps=0"], 50, 6),
    ],
    ids=["steps", "a-short-one", "qsr"],
)
def test_auto_follows_the_rounds_and_is_written_out(keys: list[str], rounds: int, length: float) -> None:
    recipe = load_recipe(RECIPE, [*keys, "sync.outer=auto"])
    assert isinstance(recipe.sync.outer, NesterovSection) and recipe.sync.outer == outer_for(rounds, length)
    assert "auto" not in resolved_yaml(recipe).partition("sync:")[2].partition("checkpoint:")[0]


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("a_edit", "the number of timed rounds is unknown"),
        ("synchronous", "a step that averages gradients is no round"),
    ],
)
def test_auto_needs_rounds_that_can_be_counted(method: str, why: str) -> None:
    with pytest.raises(RecipeError, match=rf"^sync\.outer is auto, but {why}; leave it out, or give {{kind: nesterov"):
        load_recipe(RECIPE, [f"sync.method={method}", "sync.outer=auto"])
