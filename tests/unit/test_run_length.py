"""Tests of a continued run with another length or batch: what is refused, how far the learning rate jumps, and how many samples
there were."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmtrain.config import Recipe
from llmtrain.errors import RecipeError
from llmtrain.recipe_loader import load_recipe
from llmtrain.train.run_length import LengthChange, batch_problem

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes/edit_llama_stdlib.yaml"
PER_STEP = 32 * 128


def recipe(steps: int, *overrides: str) -> Recipe:
    return load_recipe(QUICKSTART, [f"train.steps={steps}", *overrides])


def of_tokens(tokens: int) -> Recipe:
    return recipe(1, "train.steps=null", f"train.tokens={tokens}")


def test_a_run_continues_where_steps_are_left() -> None:
    for before, after, step in ((40, 80, 40), (40, 30, 20), (40, 40, 41), (80, 80, 80), (40, 41, 41), (40, 40, 20)):
        LengthChange(recipe(before), recipe(after), step).check("runs/x")
    LengthChange(recipe(40), of_tokens(41 * PER_STEP), 40).check("runs/x")


@pytest.mark.parametrize(
    ("before", "after", "step", "said"),
    [
        (
            recipe(40),
            recipe(30),
            40,
            "train.steps is 30, but runs/x has trained 40 steps already; give more to continue it",
        ),
        (recipe(40), recipe(20), 20, "train.steps is 20, but runs/x has trained 20 steps already; "),
        (
            recipe(40),
            of_tokens(30 * PER_STEP + 9),
            35,
            "train.tokens is 122889 (30 steps), but runs/x has trained 35 steps",
        ),
    ],
)
def test_fewer_steps_than_are_done_are_refused(before: Recipe, after: Recipe, step: int, said: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(said)):
        LengthChange(before, after, step).check("runs/x")


def jump(before: Recipe, after: Recipe, step: int) -> str | None:
    return LengthChange(before, after, step).rate_jump()


def test_a_jump_of_the_rate_is_said_with_what_avoids_it() -> None:
    line = jump(recipe(300), recipe(600), 300)
    assert line == (
        "learning rate: from 0.0003 in step 300 to 0.00172 in step 301, because schedule.kind=cosine now spans 600 steps; "
        "optim.lr=0.000525 would continue at 0.0003; a run with schedule.kind=constant never jumps, and one with wsd only from "
        "within its decay"
    )
    assert jump(recipe(300), recipe(600, "optim.lr=0.000525"), 300) is None, "this is the rate that the line names"
    shorter = jump(recipe(600), recipe(400), 300)
    assert shorter is not None and "to 0.000727" in shorter and "now spans 400 steps" in shorter


def test_an_outer_step_that_follows_the_length_is_said() -> None:
    auto = ("sync.method=diloco", "sync.outer=auto", "sync.period.every=30", "sync.warmup_steps=0")
    before, after = recipe(300, *auto), recipe(3000, *auto)
    outer = after.sync.outer
    assert before.sync.outer.lr != outer.lr
    assert LengthChange(before, after, 300).describe() == (
        f", for 3,000 steps instead of 300 (now sync.outer.lr={outer.lr}, sync.outer.momentum={outer.momentum}, "
        f"sync.outer.rounds={outer.rounds.model_dump()})"
    )
    assert LengthChange(recipe(300), recipe(600), 300).describe() == ", for 600 steps instead of 300"


def test_no_jump_is_none() -> None:
    constant = "schedule.kind=constant"
    drop_there = ("schedule.kind=step", "schedule.decay_at=[0.5]")
    assert jump(recipe(300), recipe(600, *drop_there), 300) is None, "from 0.0003, where the old run ended, to 0.0003"
    assert jump(recipe(300, constant), recipe(600, constant), 300) is None
    assert jump(recipe(300), recipe(300), 300) is None
    to_constant = jump(recipe(300), recipe(600, constant), 300)
    assert to_constant is not None and to_constant.endswith("optim.lr=0.0003 would continue at 0.0003")
    from_zero = jump(recipe(300, "schedule.final_ratio=0"), recipe(600, "schedule.final_ratio=0"), 300)
    assert from_zero is not None and "from 0 in step 300" in from_zero and "optim.lr" not in from_zero


WSD = ("schedule.kind=wsd", "schedule.decay_fraction=0.2")


@pytest.mark.parametrize(
    ("before", "after", "step"),
    [
        (300, 600, 100),
        (300, 600, 240),  # the last step before the first decay
        (100_000, 125, 100),  # the decay begins with the next step
        (300, 200, 150),
        (300, 600, 10),  # within the warm-up
    ],
)
def test_a_run_with_wsd_does_not_jump_from_before_its_decay(before: int, after: int, step: int) -> None:
    assert jump(recipe(before, *WSD), recipe(after, *WSD), step) is None


def test_a_run_with_wsd_jumps_from_within_a_decay() -> None:
    up = jump(recipe(300, *WSD), recipe(600, *WSD), 300)
    assert up == (
        "learning rate: from 0.0003 in step 300 to 0.003 in step 301, because schedule.kind=wsd now spans 600 steps; "
        "optim.lr=0.0003 would continue at 0.0003; from a checkpoint of step 240 or before, it would not jump"
    )
    down = jump(recipe(600, *WSD), recipe(300, *WSD), 270)
    assert down is not None and down.endswith("; from a checkpoint of step 240 or before, it would not jump")
    assert "from 0.003 in step 270 to 0.0016 in step 271" in down
    other_peak = jump(recipe(300, *WSD), recipe(600, *WSD, "optim.lr=1e-3"), 200)
    assert other_peak is not None and other_peak.endswith("optim.lr=0.003 would continue at 0.003")
    other_kind = jump(recipe(300), recipe(600, *WSD), 300)
    assert other_kind is not None and other_kind.endswith("optim.lr=0.0003 would continue at 0.0003")


def test_a_checkpoint_of_no_step_has_no_jump() -> None:
    keys = ("schedule.warmup_steps=0",)
    assert jump(recipe(300, *keys), recipe(600, *keys), 0) is None


def test_another_batch_is_said_and_is_no_jump_of_the_rate() -> None:
    change = LengthChange(recipe(40), recipe(40, "train.global_batch=64", "optim.lr=0.5"), 20)
    assert (change.is_change, change.steps_differ, change.old_global_batch, change.rate_jump()) == (
        True,
        False,
        32,
        None,
    )
    assert change.describe() == ", with 64 sequences per step instead of 32"
    both = LengthChange(recipe(40), recipe(80, "train.global_batch=64"), 20).describe()
    assert both.startswith(", for 80 steps instead of 40, with 64 sequences per step instead of 32")
    assert not LengthChange(recipe(40), recipe(40), 20).is_change


HUB = "data.source=hf:owner/name"


@pytest.mark.parametrize(
    ("keys", "batch", "problem"),
    [
        ((), 64, None),
        ((), 16, None),
        ((HUB,), 64, None),
        ((HUB,), 16, None),
        (("data.packing=none",), 64, "with data.packing=none it must stay"),
        (("train.tokens=163840", "train.steps=null"), 64, "in steps (train.tokens=null train.steps=40)"),
        (("train.tokens=327680", "train.steps=null"), 64, None),
    ],
)
def test_a_batch_may_change_where_the_data_allows_it(keys: tuple[str, ...], batch: int, problem: str | None) -> None:
    before, after = recipe(40, *keys), recipe(40, f"train.global_batch={batch}", *keys)
    if "train.tokens=327680" in keys:  # 40 steps of the larger batch, as many as the run had
        before = recipe(40)
    assert batch_problem(before, before) is None
    if problem is None:
        assert batch_problem(before, after) is None
        LengthChange(before, after, 10).check("runs/x")
    else:
        line = f"train.global_batch is {batch}, but runs/x was trained with 32; "
        with pytest.raises(RecipeError, match=rf"^{line}.*{re.escape(problem)}.*, or choose another run.name$"):
            LengthChange(before, after, 10).check("runs/x")


def test_a_smaller_batch_that_repeats_text_of_a_hub_data_set_is_warned_of() -> None:
    def warned(steps: int, batch: int, *keys: str) -> list[str]:
        after = recipe(steps, f"train.global_batch={batch}", "schedule.kind=constant", *keys)
        return list(LengthChange(recipe(100, "schedule.kind=constant", *keys), after, 90).warnings())

    [line] = warned(200, 16, HUB)
    assert line.startswith("of the 1,760 sequences that are left, about 1,440 are read a second time: a hub dataset")
    assert line.endswith("tokenized for 200 steps of 16, and 90 had 32")
    [line] = warned(100, 1, HUB)
    assert line.startswith("of the 10 sequences that are left, about 10 are read")
    for steps, batch, *keys in ((100, 64, HUB), (100, 16, HUB, "data.max_tokens=1000000"), (100, 16), (120, 32, HUB)):
        assert warned(steps, batch, *keys) == []


def test_a_hub_data_set_had_the_samples_of_the_runs_steps() -> None:
    def before(samples: int, *keys: str, name: str = "") -> int:
        return LengthChange(recipe(40, *keys), recipe(80, *keys), 40).samples_before(
            name, samples, lambda all: all // part
        )

    hub, part = "data.source=hf:owner/name", 1
    assert before(80 * 32, hub) == 40 * 32
    assert before(900, hub) == 900, "the dataset is shorter than what the old run would read"
    assert before(700, hub, "data.max_tokens=100000") == 700
    assert before(30_000) == 30_000
    mixture, part = "data.sources=[{source: hf:owner/name, weight: 1}, {source: stories, weight: 3}]", 4
    assert before(20 * 32, mixture, name="name") == 10 * 32
    assert before(20 * 32, mixture, name="stories") == 20 * 32
