"""Tests of `LocalUpdates` in users' own loops: its arithmetic, resuming, and what it refuses."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from llmtrain.config import LRScheduleSection
from llmtrain.errors import RecipeError
from llmtrain.lr import LRSchedule
from llmtrain.sync import LocalUpdates
from llmtrain.sync.own_loop.module_replica import ModuleReplica, layers_of
from tests.distributed.fake_engine import meeting_store
from tests.distributed.pool import RankPool

LR, OUTER_LR, MOMENTUM, EVERY, WARMUP, STEPS = 0.05, 0.7, 0.9, 3, 2, 9


class Layered(nn.Module):
    """Model of two layers between an embedding and a head, in float64. The weight of one layer is stored by columns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.double()
        first = self.layers[0]
        first.weight = nn.Parameter(first.weight.detach().T.contiguous().T)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(inputs)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


def tensors_in(state: Any) -> list[torch.Tensor]:
    """Return all tensors of a state_dict."""
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [state] if isinstance(state, torch.Tensor) else [tensor for part in parts for tensor in tensors_in(part)]


def backward(model: nn.Module, step: int) -> None:
    """Compute the gradients of this replica's own sample of a step."""
    drawn = torch.Generator().manual_seed(100 * step + dist.get_rank())
    model(torch.randn(5, 3, generator=drawn, dtype=torch.float64)).square().mean().backward()


def train(method: str, steps: int, choices: dict[str, Any], stop_after: int | None = None) -> list[torch.Tensor]:
    """Train, and return this replica's final parameters. After step `stop_after`, stop and resume from copies of everything."""
    model = Layered()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    updates = LocalUpdates(model, optimizer, method, **choices)
    for step in range(1, steps + 1):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        if step == stop_after:
            state, weights = copy.deepcopy(updates.state_dict()), copy.deepcopy(model.state_dict())
            sent = updates.bytes_sent
            updates.close()
            model = Layered()
            model.load_state_dict(weights)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            updates = LocalUpdates(model, optimizer, method, **choices)
            updates.load_state_dict(state)
            assert updates.bytes_sent == sent
            loaded = [(tensor, tensor.clone()) for tensor in tensors_in(state)]
    updates.finish()
    assert stop_after is None or all(torch.equal(*pair) for pair in loaded), "a loaded state must stay as it was"
    assert updates.is_synchronized
    return [parameter.detach() for parameter in model.parameters()]


def train_by_hand(steps: int) -> list[torch.Tensor]:
    """Train with DiLoCo as in the paper, after synchronous steps."""
    model = Layered()
    parameters = list(model.parameters())
    anchor: list[torch.Tensor] = []
    momentum = [torch.zeros_like(parameter) for parameter in parameters]
    for step in range(1, steps + 1):
        if step == WARMUP + 1:
            anchor = [parameter.detach().clone() for parameter in parameters]
        backward(model, step)
        with torch.no_grad():
            for parameter in parameters:
                if step <= WARMUP:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
                parameter -= LR * parameter.grad
                parameter.grad = None
            if step > WARMUP and ((step - WARMUP) % EVERY == 0 or step == steps):
                for parameter, at, b in zip(parameters, anchor, momentum, strict=True):
                    mean = (at - parameter) / dist.get_world_size()
                    dist.all_reduce(mean)
                    b.mul_(MOMENTUM).add_(mean)
                    at -= OUTER_LR * (mean + MOMENTUM * b)
                    parameter.copy_(at)
    return [parameter.detach() for parameter in parameters]


def adamw_of(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)


def train_with_averaged_moments(steps: int, by_hand: bool) -> list[torch.Tensor]:
    """Train by DES-LOC with AdamW. Parameters and first moments are averaged after every second step, second moments half as often."""
    model = Layered()
    optimizer, updates = adamw_of(model), None
    if not by_hand:
        updates = LocalUpdates(model, optimizer, "des_loc", period=2, moments={"first": 1, "second": 2})
    for step in range(1, steps + 1):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        if by_hand and step % 2 == 0:
            averaged = [parameter.data for parameter in model.parameters()]
            averaged += [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
            if step % 4 == 0:
                averaged += [optimizer.state[parameter]["exp_avg_sq"] for parameter in model.parameters()]
            for tensor in averaged:
                dist.all_reduce(tensor)
                tensor /= dist.get_world_size()
    if updates is not None:
        updates.finish()
    return [parameter.detach() for parameter in model.parameters()]


def test_moments_of_an_optimizer_are_averaged(ranks: RankPool) -> None:
    ours, expected = (ranks.run(train_with_averaged_moments, 8, by_hand, world_size=2) for by_hand in (False, True))
    for one, other in zip(ours[0], expected[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(one, other) for one, other in zip(*ours, strict=True))


def train_in_part(steps: int, unused: dict[int, int]) -> None:
    """Train, where a rank in `unused` never uses the weight of the given layer, so that its optimizer has no moments there."""
    model = Layered()
    updates = LocalUpdates(
        model,
        optimizer := adamw_of(model),
        "des_loc",
        layers=[model],
        period=2,
        moments={"first": 1, "second": None},
    )
    for step in range(1, steps + 1):
        backward(model, step)
        if (place := unused.get(dist.get_rank())) is not None:
            model.layers[place].weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
    updates.finish()


@pytest.mark.parametrize("unused", [{1: 0}, {0: 0, 1: 1}], ids=["one", "of-equal-size"])
def test_moments_of_different_parameters_are_refused(ranks: RankPool, unused: dict[int, int]) -> None:
    """This holds even if the moments of the block have the same size on each replica."""
    with pytest.raises(Exception, match=r"replicas have first moments of different parameters of "):
        ranks.run(train_in_part, 4, unused, world_size=2)


def test_an_optimizer_without_moments_is_named(ranks: RankPool) -> None:
    moments = {"moments": {"first": 1, "second": None}, "period": 2}
    with pytest.raises(Exception, match=r"sync.moments.first averages first moments, but the optimizer has none"):
        ranks.run(train, "des_loc", STEPS, moments, world_size=2)


DILOCO = {"period": {"every": EVERY}, "warmup_steps": WARMUP, "outer": {"lr": OUTER_LR, "momentum": MOMENTUM}}


def test_a_plain_loop_trains_as_the_paper_says(ranks: RankPool) -> None:
    found = ranks.run(train, "diloco", STEPS, DILOCO, world_size=2)
    expected = ranks.run(train_by_hand, STEPS, world_size=2)
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_layer_by_layer_in_the_forward_pass_is_the_same(ranks: RankPool) -> None:
    blocking, layerwise = (
        ranks.run(train, "diloco", STEPS, {**DILOCO, "schedule": schedule}, world_size=2)
        for schedule in ("blocking", "layerwise")
    )
    for one, other in zip(blocking[0], layerwise[0], strict=True):
        assert torch.equal(one, other)


SHORT = {"period": {"every": EVERY}, "warmup_steps": WARMUP}
KEYS = {
    "synchronous": {},
    "streaming_diloco": {**SHORT, "period": {"every": 4}, "schedule": {"steps": 2, "fragments": 2}},
    "edit": {**SHORT, "reduction": {"min_rounds": 2}},
    "slowmo": SHORT,
    "co2": {**SHORT, "reduction": "radial"},
}


@pytest.mark.parametrize("method", KEYS)
def test_a_stopped_loop_continues_to_the_same_bits(ranks: RankPool, method: str) -> None:
    """The stop is in the middle of a round, and with a message in flight if the schedule has one then."""
    whole, resumed = (ranks.run(train, method, STEPS, KEYS[method], stop, world_size=2) for stop in (None, 7))
    for first, second, again in zip(*whole, resumed[0], strict=True):
        assert torch.equal(first, second), "replicas must be equal at the end"
        assert torch.equal(first, again)


def refused(method: str, choices: dict[str, Any], model: nn.Module | None = None) -> str:
    model = model or Layered()
    try:
        LocalUpdates(model, torch.optim.SGD(model.parameters(), lr=LR), method, **choices)
    except RecipeError as error:
        return str(error)
    return ""


WRONG = [
    ("dilco", {}, "^method is 'dilco', expected synchronous, local_sgd.*; did you mean diloco\\?$"),
    ("diloco", {"perod": 3}, "^LocalUpdates: perod is neither .* sync; did you mean period\\?$"),
    ("diloco", {"timeout": 3}, "^LocalUpdates: timeout is neither .* sync; did you mean timeout_seconds\\?$"),
    (
        "diloco",
        {"period": {"evry": 3}},
        "^LocalUpdates: sync.period.evry is not a key; did you mean sync.period.every\\?$",
    ),
    ("diloco", {"lr": 3e-4}, "^lr is 0.0003, expected llmtrain.lr.LRSchedule.create"),
    ("diloco", {"layers": 3}, "^layers is int, expected a list of modules"),
    ("diloco", {"layers": ["head"]}, "^layers is list, expected a list of modules"),
    ("diloco", {"replicas": 2}, "^replicas is 2, expected a process group with this rank"),
    ("diloco", {"timeout_seconds": -1}, "^timeout_seconds is -1, expected a number greater than 0"),
    ("palsgd", {}, "needs llmtrain's own loop"),
    ("a_edit", {}, "timed rounds decide when a run ends, which needs llmtrain's own loop"),
    ("qsr", {"period": {"alpha": 0.1}}, "follows the learning rate: give lr"),
    ("wagma", {}, "sync.schedule=wait_avoiding needs store"),
    ("diloco", {"outer": "auto"}, "sync.outer=auto follows from the number of rounds"),
    ("synchronous", {"wire": "int8"}, "sync.wire is int8, but with sync.period=every_step only gradients are sent"),
    (
        "edit",
        {"schedule": "wait_avoiding"},
        "sync.reduction=edit_penalty can't be combined with sync.schedule=wait_avoiding",
    ),
    ("streaming_diloco", {"period": {"every": 3}}, "sync.schedule.steps is 5, but sync.period.every is 3"),
    ("streaming_diloco", {}, "sync.schedule.fragments is 4, but the model has 3 blocks"),
    ("diloco", {"verify_every": 3}, "verify_every is done at log lines of llmtrain's own loop"),
]


def test_what_such_a_loop_cannot_do_is_refused_in_one_line(ranks: RankPool) -> None:
    for method, choices, message in WRONG:
        [said] = ranks.run(refused, method, choices, world_size=1)
        assert re.search(message, said) and "\n" not in said, (method, said)


def unequal_start() -> str:
    model = Layered()
    with torch.no_grad():
        model.layers[1].weight += dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    updates = LocalUpdates(model, optimizer)
    backward(model, 1)
    try:
        optimizer.step()
    except RecipeError as error:
        return str(error)
    finally:
        updates.close()
    return ""


def test_replicas_that_start_apart_are_refused_on_all_ranks(ranks: RankPool) -> None:
    first, second = ranks.run(unequal_start, world_size=2)
    assert first == second and first.startswith(
        "replicas differ in layer 1 before the first step; give them the same model and seed"
    )


def train_with_an_unused_layer(steps: int, by_hand: bool) -> list[torch.Tensor]:
    """Train in synchronous steps. The second replica does not use the last parameter, and no replica uses the first one."""
    model = Layered()
    parameters, optimizer = list(model.parameters()), torch.optim.SGD(model.parameters(), lr=LR)
    updates = None if by_hand else LocalUpdates(model, optimizer, "synchronous")
    for step in range(1, steps + 1):
        backward(model, step)
        parameters[0].grad = None
        if dist.get_rank() == 1:
            parameters[-1].grad = None
        for parameter in parameters[1:] if by_hand else ():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        optimizer.step()
        assert parameters[0].grad is None
        optimizer.zero_grad()
    if updates is not None:
        updates.finish()
    return [parameter.detach() for parameter in parameters]


def test_a_parameter_that_a_replica_does_not_use_has_the_gradient_zero_there(ranks: RankPool) -> None:
    ours, expected = (ranks.run(train_with_an_unused_layer, 3, by_hand, world_size=2) for by_hand in (False, True))
    for found, by_hand in zip(ours, expected, strict=True):
        for one, other in zip(found, by_hand, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-14, atol=0)


def train_wagma_twice(steps: int) -> list[int]:
    """Run two loops with one store, the second longer than the first. Return the number of synchronizations of each."""
    counts, store = [], meeting_store()
    for length in (steps, 2 * steps):
        model = Layered()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        updates = LocalUpdates(model, optimizer, "wagma", store=store, period=3, warmup_steps=0, timeout_seconds=20)
        for step in range(1, length + 1):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        updates.finish()
        counts.append(updates.report().count)
    return counts


def test_loops_follow_each_other_on_one_store(ranks: RankPool) -> None:
    assert ranks.run(train_wagma_twice, 5, world_size=2) == [[2, 4]] * 2


def refused_for_groups() -> list[str]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replica"))
    sharded = fully_shard(nn.Linear(4, 2), mesh=mesh["shard"])
    transposed = {"replicas": mesh.get_group("replica"), "shards": mesh.get_group("shard")}
    cases = ((sharded, transposed), (Layered(), {"period": 1}))
    return [refused("wagma", {**choices, "store": dist.HashStore()}, model) for model, choices in cases]


def test_what_groups_of_replicas_cannot_do_is_refused(ranks: RankPool) -> None:
    for of_mesh, of_period in ranks.run(refused_for_groups, world_size=4):
        assert "expected [" in of_mesh and "the ranks of a replica must follow each other" in of_mesh
        assert of_period.startswith("sync.period.every is 1, but with sync.schedule=wait_avoiding a loop needs")


def blocks_of(model: nn.Module) -> list[str]:
    optimizer = torch.optim.SGD(model.parameters())
    return [block.name for block in ModuleReplica(model, layers_of(model), optimizer).blocks]


def test_layers_are_blocks_and_those_without_parameters_are_left_out() -> None:
    assert blocks_of(Layered()) == ["rest", "layer 0", "layer 1"]
    assert blocks_of(nn.Sequential(nn.Embedding(3, 4), nn.ReLU(), nn.Linear(4, 2))) == ["layer 0", "layer 2"]
    frozen = Layered().requires_grad_(False)
    with pytest.raises(RecipeError, match=r"^the optimizer has no trainable parameters of the module"):
        blocks_of(frozen)


def with_learning_rate() -> int:
    model = Layered()
    rates = LRSchedule(LR, STEPS, LRScheduleSection(kind="cosine"))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    updates = LocalUpdates(model, optimizer, "qsr", lr=rates, period={"base": 2, "alpha": LR * 2**0.5})
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = rates.at(step)
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    updates.finish()
    return updates.report().count


def test_rounds_that_follow_the_learning_rate(ranks: RankPool) -> None:
    assert ranks.run(with_learning_rate, world_size=2) == [3, 3]
