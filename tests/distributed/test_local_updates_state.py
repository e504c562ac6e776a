"""Tests of `LocalUpdates` in users' own loops: states that are loaded where they don't fit, FSDP2's gathered parameters, closures,
and closing."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from llmtrain.errors import RecipeError
from llmtrain.sync import LocalUpdates
from tests.distributed.fake_engine import meeting_store
from tests.distributed.pool import RankPool
from tests.distributed.test_local_updates import LR, Layered, backward


def load_into_a_running_loop() -> str:
    model = Layered()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    updates = LocalUpdates(
        model, optimizer, "wagma", store=meeting_store(), period=3, warmup_steps=0, timeout_seconds=20
    )
    backward(model, 1)
    optimizer.step()
    state = updates.state_dict()
    with pytest.raises(RecipeError) as caught:
        updates.load_state_dict(state)
    updates.finish()
    return str(caught.value)


def test_a_state_is_not_loaded_while_groups_average(ranks: RankPool) -> None:
    """The threads of the groups are at a later iteration, and the replicas would wait for one another."""
    for message in ranks.run(load_into_a_running_loop, world_size=2):
        assert message.startswith("a state of wait-avoiding groups can be loaded before the first step only")


def resume_with_a_shorter_warmup(method: str) -> list[int]:
    """Resume a loop of 10 synchronous steps as one of 2. Return the steps after which replicas were synchronized."""
    synchronized, state, weights = [], None, Layered().state_dict()
    for warmup, until in ((10, 4), (2, 9)):
        model = Layered()
        model.load_state_dict(weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        options = {"store": meeting_store(), "timeout_seconds": 20} if method == "wagma" else {}
        updates = LocalUpdates(model, optimizer, method, period=5, warmup_steps=warmup, **options)
        if state is not None:
            updates.load_state_dict(state)
        while updates.steps_done < until:
            backward(model, updates.steps_done + 1)
            optimizer.step()
            if updates.is_synchronized:
                synchronized.append(updates.steps_done)
        state, weights = updates.state_dict(), copy.deepcopy(model.state_dict())
        updates.finish()
        updates.close()
    return synchronized


@pytest.mark.parametrize("method", ["diloco", "wagma"])
def test_the_first_round_begins_where_synchronous_steps_ended(ranks: RankPool, method: str) -> None:
    """This holds even if the resumed loop has fewer synchronous steps: all parts of a method count rounds from the same step."""
    for steps in ranks.run(resume_with_a_shorter_warmup, method, world_size=2):
        assert steps == [1, 2, 3, 4, 9]


def evaluate_around_the_loop(with_rest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of a sharded replica after the last synchronization, and that of a plain model with its parameters.

    The module is evaluated before the loop and before each optimizer step.
    Without a block for the rest, the root's parameters are in a layer's block.
    """
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = Layered()
    model.layers[0].weight = nn.Parameter(model.layers[0].weight.detach().contiguous())
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    groups = {"replicas": mesh.get_group("replica"), "shards": mesh.get_group("shard")}
    layers = model.layers if with_rest else list(model.children())
    with torch.no_grad():
        model(torch.ones(1, 3, dtype=torch.float64))
    updates = LocalUpdates(model, optimizer, "diloco", **groups, layers=layers, period=2, warmup_steps=0)
    inputs = torch.ones(1, 3, dtype=torch.float64)
    for step in (1, 2):
        backward(model, step)
        with torch.no_grad():
            model(inputs)  # FSDP2 keeps the root's parameters gathered after it
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        sharded, plain = model(inputs), Layered()
        plain.load_state_dict({name: part.full_tensor() for name, part in model.state_dict().items()})
        updates.finish()
        return sharded, plain(inputs)


@pytest.mark.parametrize("with_rest", [True, False])
def test_a_sharded_replica_computes_with_what_was_synchronized_after_an_evaluation(
    ranks: RankPool, with_rest: bool
) -> None:
    outputs = ranks.run(evaluate_around_the_loop, with_rest, world_size=4)
    for sharded, plain in outputs:
        torch.testing.assert_close(sharded, plain, rtol=1e-12, atol=0)
        torch.testing.assert_close(sharded, outputs[0][0], rtol=1e-12, atol=0)


def evaluate_one_replica() -> list[str]:
    """Return this rank's warnings at the end of a loop whose first replica has evaluated the module after the last round. The root's
    parameters are frozen, and FSDP2 keeps them gathered there."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = Layered()
    model.layers[0].weight = nn.Parameter(model.layers[0].weight.detach().contiguous())
    for part in (model.embedding, model.head):
        part.requires_grad_(False)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=LR)
    groups = {"replicas": mesh.get_group("replica"), "shards": mesh.get_group("shard")}
    updates = LocalUpdates(model, optimizer, "diloco", **groups, period=1, warmup_steps=0)
    backward(model, 1)
    optimizer.step()
    if dist.get_rank() < 2:
        with torch.no_grad():
            model(torch.ones(1, 3, dtype=torch.float64))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        updates.finish()
    return [str(one.message) for one in caught]


def test_an_evaluation_on_one_replica_does_not_count_as_other_frozen_parameters(ranks: RankPool) -> None:
    assert ranks.run(evaluate_one_replica, world_size=4) == [[]] * 4


def step_with_closures() -> tuple[str, list[torch.Tensor]]:
    """Return the refusal of a synchronous step with a closure, and the parameters after local steps with closures."""

    def step(number: int) -> None:
        optimizer.zero_grad()
        optimizer.step(lambda: backward(model, number))

    model = Layered()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    updates = LocalUpdates(model, optimizer, "diloco", period=3, warmup_steps=1)
    with pytest.raises(RecipeError) as caught:
        step(1)
    updates.close()
    model = Layered()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    updates = LocalUpdates(model, optimizer, "diloco", period=3, warmup_steps=0)
    for number in range(1, 7):
        step(number)
    updates.finish()
    return str(caught.value), list(model.state_dict().values())


def test_a_closure_is_refused_where_gradients_are_averaged_before_it(ranks: RankPool) -> None:
    (first, mine), (_, theirs) = ranks.run(step_with_closures, world_size=2)
    assert first.startswith(
        "step 1 averages gradients over the replicas, but optimizer.step(closure) computes them afterwards"
    )
    assert all(map(torch.equal, mine, theirs))


def close_before_a_forward() -> tuple[bool, bool]:
    """Return whether the forward after `close` sent nothing, and whether the closed replica is freed."""
    model = Layered()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    updates = LocalUpdates(model, optimizer, "edit", period=1, warmup_steps=0, schedule="layerwise")
    backward(model, 1)
    optimizer.step()  # the next forward synchronizes
    updates.close()
    before = updates.bytes_sent
    backward(model, 2)
    is_silent, replica = updates.bytes_sent == before, weakref.ref(updates.replica)
    del updates
    gc.collect()
    return is_silent, replica() is None


def test_what_is_closed_neither_synchronizes_nor_stays_in_memory(ranks: RankPool) -> None:
    assert ranks.run(close_before_a_forward, world_size=2) == [(True, True)] * 2
