"""Tests of the hooks of `LocalUpdates` in optimizers and modules whose calls torch changes: subclasses, GradScaler and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from llmtrain.errors import RecipeError
from llmtrain.sync import LocalUpdates
from tests.distributed.pool import RankPool
from tests.distributed.test_local_updates import LR, Layered, backward

CHOICES = {"period": 3, "warmup_steps": 1}


class Derived(torch.optim.AdamW):
    """AdamW whose `step` calls that of the base class, so that torch calls hooks twice."""

    fails = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.fails:
            raise MemoryError
        return super().step(closure)


def train_with(kind: type[torch.optim.AdamW]) -> tuple[list[tuple[int, int]], list[torch.Tensor]]:
    """Return the numbers of steps and rounds after each step, and the final parameters. Another optimizer of the base class exists,
    so that torch hooks its `step`, too."""
    torch.optim.AdamW(nn.Linear(1, 1).parameters())
    model = Layered()
    optimizer = kind(model.parameters(), lr=LR)
    updates, counted = LocalUpdates(model, optimizer, "diloco", **CHOICES), []
    for step in range(1, 9):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        counted.append((updates.steps_done, updates.report().count))
    updates.finish()
    return counted, [parameter.detach() for parameter in model.parameters()]


def test_a_step_that_calls_that_of_its_base_class_counts_once(ranks: RankPool) -> None:
    (counted, found), (expected, plain) = (
        ranks.run(train_with, kind, world_size=2)[0] for kind in (Derived, torch.optim.AdamW)
    )
    assert counted == expected and counted[-1] == (8, 2)
    assert all(map(torch.equal, found, plain))


def step_alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_a_step_after_a_failed_one_counts() -> None:
    torch.optim.AdamW(nn.Linear(1, 1).parameters())
    model = Layered()
    optimizer = Derived(model.parameters(), lr=LR)
    updates = LocalUpdates(model, optimizer, "diloco", period=3, warmup_steps=0)
    optimizer.fails = True
    with pytest.raises(MemoryError):
        step_alone(model, optimizer)
    optimizer.fails = False
    for _ in range(2):
        step_alone(model, optimizer)
    assert (updates.steps_done, updates.report().count) == (3, 1)
    updates.close()


def scale_gradients_for_a_fused_optimizer() -> str:
    model = Layered().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    scaler, updates = torch.amp.GradScaler("cpu", init_scale=2.0), LocalUpdates(model, optimizer, "diloco", **CHOICES)
    scaler.scale(model(torch.ones(5, 3)).square().mean()).backward()
    with pytest.raises(RecipeError) as caught:
        scaler.step(optimizer)
    updates.close()
    return str(caught.value)


def test_a_fused_optimizer_that_skips_steps_itself_is_refused_in_synchronous_steps(ranks: RankPool) -> None:
    mine, theirs = ranks.run(scale_gradients_for_a_fused_optimizer, world_size=2)
    assert mine == theirs and "\n" not in mine
    assert mine.startswith(
        "step 1 averages gradients over the replicas, but GradScaler leaves scaled gradients to a fused"
    )


@pytest.mark.parametrize("part", ["module", "step"])
def test_communication_is_not_compiled(part: str) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    schedule = "layerwise" if part == "module" else "blocking"
    updates = LocalUpdates(model, optimizer, "diloco", period=1, warmup_steps=0, schedule=schedule)
    forward = torch.compile(model, backend=keep) if part == "module" else model
    step = torch.compile(optimizer.step, backend=keep) if part == "step" else optimizer.step
    for _ in range(4):
        forward(torch.ones(2, 3)).square().mean().backward()
        step()
        optimizer.zero_grad()
    updates.finish()
    assert updates.report().count == 4
    for g in graphs:
        print("GRAPH", [n.target for n in g.graph.nodes if n.op != "placeholder" and n.op != "output"])
    torch.compiler.reset()
    assert 0 < len(graphs) <= 2, "one graph per compiled part, without communication"
