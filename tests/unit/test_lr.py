"""Tests of learning rate schedules: each kind over a run, schedules of plain values, and comparison with an optimizer's rates."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from llmtrain.config import LRScheduleSection
from llmtrain.errors import RecipeError
from llmtrain.lr import LRSchedule
from llmtrain.sync.own_loop.loop_checks import find_rate_mismatch

LIBRARY = Path(__file__).parents[2] / "docs/library.md"


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_learning_rate_warms_up_and_ends_where_it_should(kind):
    schedule = LRScheduleSection(kind=kind, warmup_steps=10, final_ratio=0.1)
    rates = [LRSchedule(2.0, 110, schedule).at(step) for step in range(1, 111)]
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[-1] == pytest.approx(2.0 if kind == "constant" else 0.2)
    assert all(later <= earlier for earlier, later in pairwise(rates[9:]))
    halfway = {"cosine": 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.5)), "linear": 0.55, "constant": 1.0}[kind]
    assert rates[59] == pytest.approx(2.0 * halfway)


def test_learning_rate_without_warm_up_starts_at_the_peak():
    assert LRSchedule(3.0, 10**6, LRScheduleSection(kind="cosine")).at(1) == pytest.approx(3.0)


def test_a_step_schedule_drops_after_its_shares_of_the_run():
    schedule = LRScheduleSection(kind="step", warmup_steps=2, decay_at=(0.5, 0.75), decay_factor=0.1)
    rates = [LRSchedule(2.0, 8, schedule).at(step) for step in range(1, 9)]
    assert rates == pytest.approx([1.0, 2.0, 2.0, 2.0, 0.2, 0.2, 0.02, 0.02])
    rounded_down = LRSchedule(1.0, 100, LRScheduleSection(kind="step", decay_at=(0.29,), decay_factor=0.1))
    assert (rounded_down.at(29), rounded_down.at(30)) == (1.0, 0.1)


def test_a_schedule_of_plain_values_is_that_of_a_recipe() -> None:
    section = LRScheduleSection(kind="linear", warmup_steps=5, final_ratio=0.2)
    created = LRSchedule.create(peak=2, total_steps=1e2, kind="linear", warmup_steps=5, final_ratio=0.2)
    assert created == LRSchedule(2.0, 100, section)
    assert LRSchedule.create(peak=1.0, total_steps=7).schedule == LRScheduleSection()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"peak": 0}, "peak is 0; Input should be greater than 0"),
        ({"total_steps": 0.5}, "total_steps is 0.5; Input should be a valid integer"),
        ({"warmup": 3}, "warmup is 3; Extra inputs are not permitted"),
        ({"kind": "cosin"}, "kind is 'cosin'; Input should be 'cosine', 'linear'"),
        ({"decay_at": (2.0,)}, "decay_at is 2.0; Input should be less than or equal to 1"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=f"^LRSchedule: {re.escape(said)}") as caught:
        LRSchedule.create(**{"peak": 1.0, "total_steps": 10, **wrong})
    assert "\n" not in str(caught.value)


def test_the_page_gives_optimizer_and_rounds_one_schedule() -> None:
    [code] = re.findall(r"```python\n(from llmtrain.lr import.*?)```", LIBRARY.read_text(), re.DOTALL)
    given: dict[str, Any] = {"torch": torch, "model": torch.nn.Linear(1, 1), "LocalUpdates": lambda *_, **__: None}
    exec(code, given)
    optimizer, scheduler = given["optimizer"], given["scheduler"]
    for step in range(1, 300):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(given["rates"].at(step))
        optimizer.step()
        scheduler.step()


def optimizer_of(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])


RATES = LRSchedule.create(peak=1.0, total_steps=100, kind="linear", warmup_steps=20, final_ratio=0)


def test_another_rate_is_noticed_after_the_warm_up() -> None:
    assert find_rate_mismatch(RATES, 60, optimizer_of(0.5)) is None
    said = find_rate_mismatch(RATES, 60, optimizer_of(0.6))
    assert said == (
        "the optimizer's learning rate is 0.6, but lr, which decides when replicas synchronize, has 0.5; give both the same schedule"
    )
    assert find_rate_mismatch(RATES, 60, optimizer_of(0.4)) is not None
    assert find_rate_mismatch(RATES, 60, optimizer_of(0.05, 0.5)) is None, "another parameter group has the rate"
    assert find_rate_mismatch(RATES, 20, optimizer_of(0.1)) is None, "no round depends on the warm-up"
    assert find_rate_mismatch(RATES, 150, optimizer_of(0.0)) is None, "beyond the end, the rate stays the same"
    assert find_rate_mismatch(LRSchedule.create(peak=1.0, total_steps=9), 1, optimizer_of(1.0)) is None


def test_schedulers_may_count_from_0() -> None:
    steps = LRSchedule.create(peak=1.0, total_steps=10, kind="step", decay_at=[0.5])
    optimizer = optimizer_of(1.0)
    scheduler = LambdaLR(optimizer, lambda done: 1.0 if done <= 5 else 0.1)  # drops a step later
    for step in range(1, 11):
        assert find_rate_mismatch(steps, step, optimizer) is None
        optimizer.step()
        scheduler.step()
    assert find_rate_mismatch(steps, 8, optimizer_of(1.0)) is not None
