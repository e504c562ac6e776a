"""Tests of `LocalUpdates` in loops whose replicas take different numbers of steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmtrain.errors import TrainingError
from llmtrain.sync import LocalUpdates
from tests.distributed.pool import RankPool
from tests.distributed.test_local_updates import Layered, adamw_of, backward

CASES: dict[str, tuple[str, dict[str, Any], tuple[int, int], int]] = {
    "a forward after a layer-wise round": ("edit", {"period": 2, "warmup_steps": 1}, (6, 5), 0),
    "the first local step": ("diloco", {"period": 3, "warmup_steps": 2}, (3, 2), 0),
    "a rank without data": ("diloco", {"period": 3, "warmup_steps": 2}, (3, 0), 0),
    "a rank without data and warm-up": ("diloco", {"period": 3, "warmup_steps": 0}, (3, 0), 0),
    "a rank without data after loading": ("diloco", {"period": 3, "warmup_steps": 2}, (7, 4), 4),
    "a comparison of rates": ("co2", {"period": 8, "warmup_steps": 0}, (4, 3), 0),
}
"""Method, choices, steps of each rank, and step after which the loop is saved and loaded, if any."""


def train_unevenly(method: str, choices: dict[str, Any], steps: tuple[int, int], load_after: int) -> str:
    model = Layered()
    optimizer = adamw_of(model)
    updates = LocalUpdates(model, optimizer, method, **choices)
    with pytest.raises(TrainingError) as caught:
        for step in range(1, steps[dist.get_rank()] + 1):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            if step == load_after:
                state = copy.deepcopy(updates.state_dict())
                updates.close()
                updates = LocalUpdates(model, optimizer, method, **choices)
                updates.load_state_dict(state)
        updates.finish()
    updates.close()
    return str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_ends_early_meets_the_others_in_an_error(ranks: RankPool, case: str) -> None:
    """Without a comparison first, gloo would abort a process, because the ranks' messages have different kinds."""
    mine, theirs = ranks.run(train_unevenly, *CASES[case], world_size=2)
    assert mine == theirs and "; all ranks must take the same number of optimizer steps" in mine


def loop_without_steps() -> bool:
    """Finish a second loop of an optimizer whose moments differ, without a step."""
    model = Layered()
    optimizer = adamw_of(model)
    for steps, warmup in ((2, 0), (0, 2)):
        updates = LocalUpdates(model, optimizer, "diloco", period=2, warmup_steps=warmup)
        for step in range(1, steps + 1):
            backward(model, step)
            optimizer.step()
        updates.finish()
    moments = torch.stack([optimizer.state[one]["exp_avg"].sum() for one in model.parameters()])
    others = torch.empty(2 * len(moments), dtype=moments.dtype)
    dist.all_gather_into_tensor(others, moments)
    return not torch.equal(*others.chunk(2))


def test_a_loop_without_steps_may_have_other_moments(ranks: RankPool) -> None:
    assert ranks.run(loop_without_steps, world_size=2) == [True, True]
