"""Tests of a new kind of a choice, added as CONTRIBUTING says, without changes to the package: its class with its keys and their
consequences, its implementation, and its entry in a list. The trainer, the engines and the estimates know nothing else of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
from pydantic import PositiveFloat

from llmtrain.config import BlockingSection, OuterSection, SyncScheduleSection, SyncSection
from llmtrain.plan.memory import estimate
from llmtrain.plan.model_size import size_of
from llmtrain.recipe_loader import load_recipe
from llmtrain.sync.build_method import OUTERS, SCHEDULES
from llmtrain.sync.local_steps import LocalSteps
from llmtrain.sync.outer import Outer
from llmtrain.sync.schedules.blocking import BlockingSchedule
from tests.distributed.fake_engine import Scenario, choices, replay
from tests.distributed.oracle import Oracle
from tests.distributed.threads import simulate
from tests.distributed.trace import assert_same_bits, assert_same_run

RECIPE = Path(__file__).parents[2] / "recipes/edit_1b.yaml"


class AdaptiveSection(OuterSection):
    """Outer Adam, which keeps two tensors per block (arXiv 2003.00295)."""

    kind: Literal["adaptive"] = "adaptive"
    state: ClassVar[tuple[str, ...]] = ("first", "second")
    lr: PositiveFloat = 0.01


class Adaptive(Outer):
    """Adam: m <- 0.9 m + 0.1 D; v <- 0.99 v + 0.01 D^2; anchor <- anchor - lr m / (sqrt(v) + 0.001)."""

    def __init__(self, lr: float):
        self.lr = lr

    def step(
        self, anchor: torch.Tensor, mean: torch.Tensor, state: Sequence[torch.Tensor], local_steps: LocalSteps
    ) -> None:
        first, second = state
        first.lerp_(mean, 0.1)
        second.lerp_(mean.square(), 0.01)
        anchor.addcdiv_(first, second.sqrt().add_(1e-3), value=-self.lr)


OUTERS[AdaptiveSection] = lambda section: Adaptive(section.lr)


class OneByOneSection(SyncScheduleSection):
    """Blocking schedule with a single block in flight. It is slower, and needs less memory."""

    kind: Literal["one_by_one"] = "one_by_one"

    @property
    def blocks_in_flight(self) -> int:
        return 1


SCHEDULES[OneByOneSection] = BlockingSchedule


def with_choice(sync: SyncSection, **choice: object) -> SyncSection:
    """Return the section that the recipe loader makes once a kind is listed in `AnyOuter` or `AnySchedule`."""
    return sync.model_copy(update=choice)


def test_an_outer_optimizer_follows_its_equation_and_keeps_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def outer_step(oracle: Oracle, block: int, mean: np.ndarray, g: float) -> None:
        first, second = vars(oracle).setdefault("adaptive", {}).get(block, (0.0, 0.0))
        first, second = 0.9 * first + 0.1 * mean, 0.99 * second + 0.01 * mean**2
        oracle.adaptive[block] = first, second
        oracle.anchor[block] = oracle.anchor[block] - oracle.sync.outer.lr * first / (np.sqrt(second) + 1e-3)

    monkeypatch.setattr(Oracle, "outer_step", outer_step)
    for schedule in ("blocking", "layerwise"):
        chosen = with_choice(choices("diloco", every=3, schedule=schedule), outer=AdaptiveSection(lr=0.1))
        for resumed in (None, 7):
            scenario = Scenario(chosen, resume_after=resumed)
            assert_same_run(simulate(scenario), replay(scenario))


def test_what_an_outer_optimizer_keeps_is_in_the_estimate() -> None:
    recipe = load_recipe(RECIPE, ["sync.offload=false"])
    other = recipe.model_copy(update={"sync": with_choice(recipe.sync, outer=AdaptiveSection())})
    nesterov, adaptive = (estimate(one, size_of(recipe), 2, 4) for one in (recipe, other))
    assert 3 * nesterov.anchors == 2 * adaptive.anchors > 0


def test_a_schedule_orders_the_same_operations_and_tells_its_memory() -> None:
    blocking, one_by_one = (
        with_choice(choices("diloco", every=3), schedule=section) for section in (BlockingSection(), OneByOneSection())
    )
    assert_same_bits(simulate(Scenario(one_by_one)), simulate(Scenario(blocking)))
    recipe = load_recipe(RECIPE, ["sync.schedule=blocking"])
    other = recipe.model_copy(update={"sync": with_choice(recipe.sync, schedule=OneByOneSection())})
    size = size_of(recipe)
    assert estimate(other, size, 2, 4).messages < estimate(recipe, size, 2, 4).messages
