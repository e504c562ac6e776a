"""Tests of `LocalUpdates` in loops whose replicas are not equal where they must be, and in a second loop of an optimizer."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmtrain.errors import RecipeError, TrainingError
from llmtrain.sync import LocalUpdates
from llmtrain.sync.own_loop.local_updates import warn_of_unfinished
from tests.distributed.pool import RankPool
from tests.distributed.test_local_updates import LR, Layered, adamw_of, backward

CHOICES = {"period": 3, "warmup_steps": 2}


class Loop:
    """Replica with AdamW, in a loop of its own."""

    def __init__(self, saved: dict[str, Any] | None = None, parts: str = "model optimizer updates", **choices: Any):
        """Create a replica, and load `parts` of what another loop has saved."""
        self.model = Layered()
        self.optimizer = adamw_of(self.model)
        self.updates = LocalUpdates(self.model, self.optimizer, "diloco", **(CHOICES | choices))
        for part in parts.split() if saved else ():
            getattr(self, part).load_state_dict(copy.deepcopy(saved[part]))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            backward(self.model, self.updates.steps_done + 1)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def saved(self) -> dict[str, Any]:
        parts = ("model", "optimizer", "updates")
        return {part: copy.deepcopy(getattr(self, part).state_dict()) for part in parts}


def refusal_of_a_step(loop: Loop) -> str:
    with pytest.raises(RecipeError) as caught:
        loop.step()
    loop.updates.close()
    return str(caught.value)


def saved_at(**choices: Any) -> dict[int, dict[str, Any]]:
    """Return what a loop saves after a step in a round, and after the last one of that round."""
    loop, at = Loop(**choices), {}
    for step in (4, 5):
        loop.step(step - loop.updates.steps_done)
        at[step] = loop.saved()
    loop.updates.close()
    return at


def continue_wrongly() -> list[str]:
    """Return the refusal of each wrong way to continue. Every rank must refuse each of them."""
    is_second, at, layerwise = dist.get_rank() == 1, saved_at(), saved_at(schedule="layerwise")
    other_anchor = copy.deepcopy(at[5])
    other_anchor["updates"]["tensors"]["anchor"][0] += dist.get_rank()
    return [
        refusal_of_a_step(Loop(at[5 - is_second])),
        refusal_of_a_step(Loop(layerwise[5 - is_second], schedule="layerwise")),  # rank 0 has a synchronization pending
        refusal_of_a_step(Loop(at[5], "model optimizer" if is_second else "model optimizer updates")),
        refusal_of_a_step(Loop(at[5], period=3 + is_second)),
        refusal_of_a_step(Loop(other_anchor)),
        refusal_of_a_step(Loop(at[4], "optimizer updates" if is_second else "model optimizer updates")),
        refusal_of_a_step(Loop(at[5], "model optimizer")),
    ]


def test_replicas_that_do_not_continue_alike_are_refused_on_all_ranks(ranks: RankPool) -> None:
    mine, theirs = ranks.run(continue_wrongly, world_size=2)
    assert mine == theirs and not any("\n" in said for said in mine)
    of_steps = "rank 0 continues from step 5, rank 1 continues from step 4; load checkpoints of the same step"
    expected = (
        of_steps,
        of_steps,
        "rank 0 continues from step 5, rank 1 has no state; load",
        "rank 1 and rank 0 have different arguments: ",
        "the states of step 5 have different anchors",
        "the module of rank 1 does not have the parameters with which its state was saved",
        "the replicas' optimizers have different moments of rest before the first step, so equal gradients",
    )
    for said, start in zip(mine, expected, strict=True):
        assert said.startswith(start)


def texts_of(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught]


def begin_with_other_moments() -> list[str]:
    """Return the warnings of a loop whose optimizer another loop has saved. A loop that follows another one does not warn."""
    loop = Loop()
    loop.step(5)
    saved = loop.saved()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop.updates.finish()
        again = LocalUpdates(loop.model, loop.optimizer, "diloco", period=3, warmup_steps=0)
        backward(loop.model, 1)
        loop.optimizer.step()
        again.finish()
        assert texts_of(caught) == [], "a loop may follow another"
        loop = Loop(saved, "model optimizer", warmup_steps=0)
        loop.step(2)
        loop.updates.finish()
    return texts_of(caught)


def test_other_moments_are_warned_of_where_replicas_stay_equal(ranks: RankPool) -> None:
    mine, theirs = ranks.run(begin_with_other_moments, world_size=2)
    assert theirs == [] and [said[:71] for said in mine] == [
        "step 0: the replicas' optimizers have different moments of rest before "
    ]


def refusal_of_the_end(loop: Loop) -> str:
    with pytest.raises(TrainingError) as caught:
        loop.updates.finish()
    loop.updates.close()
    return str(caught.value)


def finish_after_the_missing_step() -> list[torch.Tensor]:
    loop = Loop(warmup_steps=0)
    loop.step(1 + dist.get_rank())
    with pytest.raises(TrainingError, match="the same number of optimizer steps"):
        loop.updates.finish()
    loop.step(1 - dist.get_rank())
    loop.updates.finish()
    loop.updates.finish()  # the second call does nothing
    return list(loop.model.state_dict().values())


def test_a_refused_end_can_be_repeated(ranks: RankPool) -> None:
    mine, theirs = ranks.run(finish_after_the_missing_step, world_size=2)
    assert all(map(torch.equal, mine, theirs))


def end_a_round_after_other_steps() -> list[str]:
    """Return the errors of a round's last step and of a synchronous step, while the other rank finishes."""
    said = []
    for warmup in (0, 5):
        loop = Loop(warmup_steps=warmup)
        loop.step(2)
        with pytest.raises(TrainingError) as caught:
            loop.updates.finish() if dist.get_rank() else loop.step()
        loop.updates.close()
        said.append(str(caught.value))
    return said


def test_ranks_with_other_steps_meet_in_an_error(ranks: RankPool) -> None:
    mine, theirs = ranks.run(end_a_round_after_other_steps, world_size=2)
    assert mine == theirs
    assert all(said.startswith("rank 0 has taken 3 steps, rank 1 has taken 2 steps; all ranks") for said in mine)


def finish_one_of_two_optimizers() -> list[str]:
    """Return this rank's warnings at the end of a loop that synchronizes only the head."""
    loop = Loop()
    loop.updates.close()
    head, rest = (torch.optim.SGD(part.parameters(), lr=LR) for part in (loop.model.head, loop.model.layers))
    updates = LocalUpdates(loop.model, head, "diloco", **CHOICES)
    for number in range(1, 6):
        backward(loop.model, number)
        for optimizer in (head, rest):
            optimizer.step()
            optimizer.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        updates.finish()
    return texts_of(caught)


def test_an_optimizer_without_a_loop_is_noticed_at_the_end(ranks: RankPool) -> None:
    mine, theirs = ranks.run(finish_one_of_two_optimizers, world_size=2)
    [said] = mine
    assert (
        said.startswith("step 5: replicas differ in parameters of the module that are not the optimizer's")
        and not theirs
    )


def finish_with_a_frozen_part() -> list[str]:
    """Return this rank's warnings at the end of a loop whose frozen parameters differ: a byte of a quantized layer."""
    loop = Loop()
    loop.updates.close()
    loop.model.quantized = torch.nn.Parameter(
        torch.tensor([3, dist.get_rank()], dtype=torch.uint8), requires_grad=False
    )
    updates = LocalUpdates(loop.model, loop.optimizer, "diloco", **(CHOICES | {"warmup_steps": 0}))
    backward(loop.model, 1)
    loop.optimizer.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        updates.finish()
    return texts_of(caught)


def test_a_frozen_part_that_differs_is_noticed_at_the_end(ranks: RankPool) -> None:
    [said], theirs = ranks.run(finish_with_a_frozen_part, world_size=2)
    assert (
        said.startswith("step 1: replicas differ in parameters of the module that are not the optimizer's")
        and not theirs
    )


def begin_twice() -> list[str]:
    loop = Loop()
    with torch.no_grad():
        loop.model.head.weight += dist.get_rank()
    said = []
    for _ in range(2):
        with pytest.raises(RecipeError) as caught:
            loop.step()
        said.append(str(caught.value))
    loop.updates.close()
    return said


def test_a_refused_beginning_is_refused_again(ranks: RankPool) -> None:
    mine, theirs = ranks.run(begin_twice, world_size=2)
    assert mine == theirs and all(said.startswith("replicas differ in rest before the first step") for said in mine)


def finish_wrongly() -> list[str]:
    longer, changed = Loop(warmup_steps=0), Loop()
    longer.step(1 + dist.get_rank())
    changed.step(2)
    with torch.no_grad():
        changed.model.layers[0].weight += dist.get_rank()
    return [refusal_of_the_end(longer), refusal_of_the_end(changed)]


def test_an_end_with_other_steps_or_parameters_is_refused_on_all_ranks(ranks: RankPool) -> None:
    mine, theirs = ranks.run(finish_wrongly, world_size=2)
    assert mine == theirs
    assert mine[0].startswith("rank 0 has taken 1 steps, rank 1 has taken 2 steps; all ranks must take the same number")
    assert mine[1].startswith("replicas differ in layer 0 after the last synchronization")


def test_an_optimizer_has_one_open_loop() -> None:
    loop = Loop()
    with pytest.raises(RecipeError, match=r"^the optimizer has a LocalUpdates already"):
        LocalUpdates(loop.model, loop.optimizer, "local_sgd")
    loop.updates.close()
    LocalUpdates(loop.model, loop.optimizer, "diloco", **CHOICES)
    loop.updates.close()  # closing the first loop again does not close the second one
    with pytest.raises(RecipeError, match=r"^the optimizer has a LocalUpdates already"):
        LocalUpdates(loop.model, loop.optimizer, "local_sgd")


def step_alone(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        parameter.grad = torch.full_like(parameter, LR)
    loop.optimizer.step()


def test_a_process_that_ends_without_a_finish_is_warned() -> None:
    loop = Loop(warmup_steps=0)
    step_alone(loop)
    with pytest.warns(UserWarning, match=r"^step 1: the process ends without LocalUpdates\.finish\(\)"):
        warn_of_unfinished()
    loop.updates.finish()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_unfinished()


def test_a_step_after_the_end_is_refused() -> None:
    loop = Loop(warmup_steps=0)
    step_alone(loop)
    loop.updates.finish()
    for _ in range(2):
        with pytest.raises(RecipeError, match=r"^LocalUpdates has finished"):
            step_alone(loop)
    again = LocalUpdates(loop.model, loop.optimizer, "diloco", **CHOICES)
    step_alone(loop)
    with pytest.warns(
        UserWarning, match=r"^step 1: all steps averaged gradients, because diloco begins with 2 such steps"
    ):
        again.finish()
    again.close()
    step_alone(loop)
