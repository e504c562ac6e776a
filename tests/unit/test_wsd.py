"""Tests of the schedule `wsd` (warmup-stable-decay): its rates by the papers' formulas, and what depends on these rates."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

from llmtrain.config import LRScheduleSection, QsrSection, SyncSection
from llmtrain.errors import RecipeError
from llmtrain.lr import LRSchedule
from llmtrain.recipe_check import check
from llmtrain.recipe_loader import load_recipe
from llmtrain.step_counts import round_count, warmup_steps
from llmtrain.sync.period import build_period, warmup_of

RECIPE = Path(__file__).resolve().parents[2] / "recipes/edit_llama_stdlib.yaml"
DECAYS = {"linear": lambda x: 1 - x, "1-sqrt": lambda x: 1 - math.sqrt(x)}


def wsd(steps: int, peak: float = 1.0, **keys: object) -> LRSchedule:
    return LRSchedule(peak, steps, LRScheduleSection(kind="wsd", **keys))


def rates_of(schedule: LRSchedule) -> list[float]:
    return [schedule.at(step) for step in range(1, schedule.total_steps + 1)]


def test_rates_of_a_short_run():
    assert rates_of(wsd(10, warmup_steps=2, decay_fraction=0.4, final_ratio=0)) == pytest.approx(
        [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]
    )
    root = rates_of(wsd(10, 2.0, warmup_steps=2, decay_fraction=0.4, final_ratio=0, decay_shape="1-sqrt"))
    assert root == pytest.approx([1, 2, 2, 2, 2, 2, 1, 2 - math.sqrt(2), 2 - math.sqrt(3), 0])


@pytest.mark.parametrize("shape", DECAYS)
@pytest.mark.parametrize(
    ("steps", "warmup", "fraction", "decay", "final"),
    [
        (100, 10, 0.2, 20, 0.1),
        (100, 93, 0.07, 7, 0.05),
        (1000, 0, 0.333, 333, 0.0),
        (57, 3, 0.5, 28, 0.3),
        (100, 5, 0.29, 29, 0.1),
    ],
)
def test_rates_are_those_of_the_papers(shape: str, steps: int, warmup: int, fraction: float, decay: int, final: float):
    """Steps count from 1 here, and from 0 in the papers, which warm up from 0."""
    keys = {"warmup_steps": warmup, "decay_fraction": fraction, "decay_shape": shape, "final_ratio": final}
    found = rates_of(wsd(steps, 3e-3, **keys))
    expected = [n / warmup if warmup else 1.0 for n in range(1, warmup + 1)]
    expected += [1.0] * (steps - warmup - decay)
    expected += [final + (1 - final) * DECAYS[shape](n / decay) for n in range(1, decay + 1)]
    assert found == pytest.approx([3e-3 * rate for rate in expected])
    assert {*found[warmup : steps - decay]} <= {3e-3}, "exactly the peak, so that no other rule sees a change"
    assert all(later <= earlier for earlier, later in pairwise(found[max(0, warmup - 1) :]))


def test_a_decay_takes_at_least_one_step_and_at_most_all():
    assert rates_of(wsd(4, decay_fraction=0.01, final_ratio=0.5)) == [1, 1, 1, 0.5]
    linear = LRSchedule(1.0, 8, LRScheduleSection(kind="linear"))
    assert rates_of(wsd(8, decay_fraction=1)) == rates_of(linear)
    assert wsd(10).at(13) == wsd(10).at(10) == pytest.approx(0.1), "fast replicas take more steps than the run has"


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "step"])
def test_other_schedules_have_no_decay_of_this_kind(kind: str):
    plain = LRScheduleSection(kind=kind, warmup_steps=5)
    given = LRScheduleSection(kind=kind, warmup_steps=5, decay_fraction=0.5, decay_shape="1-sqrt")
    assert rates_of(LRSchedule(1.0, 30, given)) == rates_of(LRSchedule(1.0, 30, plain))


def test_the_plateau_does_not_depend_on_the_length():
    short, long = wsd(100, warmup_steps=10), wsd(1000, warmup_steps=10)
    assert short.last_peak_step == 80 and long.last_peak_step == 800
    assert [short.at(step) for step in range(1, 81)] == [long.at(step) for step in range(1, 81)]


def recipe(*overrides: str):
    return load_recipe(RECIPE, ["schedule.kind=wsd", "train.steps=100", "sync.warmup_steps=10", *overrides])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["schedule.decay_fraction=1.5"], "schedule.decay_fraction is 1.5, expected a number less than or equal to 1"),
        (["schedule.decay_fraction=0"], "schedule.decay_fraction is 0, expected a number greater than 0"),
        (["schedule.decay_shape=cosine"], "schedule.decay_shape is \"cosine\", expected 'linear' or '1-sqrt'"),
        (
            ["schedule.warmup_steps=61", "schedule.decay_fraction=0.4"],
            "schedule.warmup_steps=61 and schedule.decay_fraction=0.4 (40 steps) are more than the run's 100 steps; lower one of",
        ),
    ],
)
def test_a_decay_that_does_not_fit_is_one_line(overrides: list[str], message: str):
    with pytest.raises(RecipeError) as refused:
        check(recipe(*overrides), 4)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_decay_that_just_fits_or_is_not_used_is_accepted():
    check(recipe("schedule.warmup_steps=60", "schedule.decay_fraction=0.4"), 4)
    check(recipe("schedule.warmup_steps=61", "schedule.decay_fraction=0.4", "schedule.kind=cosine"), 4)


def test_local_steps_begin_within_the_decay():
    """With a linear decay to a tenth of the peak over the last 20 of 100 steps, half the peak is reached after 11.1 steps."""
    assert [wsd(100, warmup_steps=10).first_step_below(share) for share in (1, 0.99, 0.5, 0.1)] == [11, 81, 92, 100]
    assert wsd(100).first_step_below(0.05) == 101, "never"
    sync = SyncSection(method="post_local_sgd", warmup_until_lr=0.5)
    assert warmup_of(sync, wsd(100)) == 91
    assert warmup_steps(recipe("sync.method=post_local_sgd", "sync.warmup_until_lr=0.5")) == 91
    with pytest.raises(RecipeError, match=r"sync\.warmup_until_lr is 0\.05, which optim\.lr's schedule never falls to"):
        check(recipe("sync.method=post_local_sgd", "sync.warmup_until_lr=0.05"), 4)


def test_rounds_of_qsr_grow_within_the_decay_only():
    """A round has max(base, floor((alpha / lr)^2)) steps, where lr is the rate of its first step (arXiv 2310.14423)."""
    rates = wsd(400, 2e-3, warmup_steps=20, decay_fraction=0.25, final_ratio=0.05)
    period = build_period(QsrSection(base=4, alpha=4e-3), 20, rates)
    ends = [step for step in range(1, 401) if period.ends_round(step)]
    expected, end = [], 20
    while end < 400:
        share = 1 if end + 1 <= 300 else 0.05 + 0.95 * (400 - (end + 1)) / 100
        end = min(400, end + max(4, math.floor((2 / share) ** 2 + 1e-9)))
        expected.append(end)
    assert ends == expected
    lengths = [end - start for start, end in pairwise([20, *ends])]
    assert lengths[:70] == [4] * 70 and lengths[-2] > 10 and lengths[:-1] == sorted(lengths[:-1])
    qsr = ["sync.method=qsr", "sync.period.base=4", "sync.period.alpha=6e-3", "sync.warmup_steps=20"]
    assert round_count(recipe(*qsr, "schedule.kind=constant")) > round_count(recipe(*qsr)) > 80 // 4 - 5
