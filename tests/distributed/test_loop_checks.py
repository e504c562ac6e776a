"""Tests of `LocalUpdates` in loops that it refuses with a one-line message, and in loops with several optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from llmtrain.errors import RecipeError
from llmtrain.lr import LRSchedule
from llmtrain.sync import LocalUpdates
from llmtrain.sync.own_loop import local_updates
from llmtrain.sync.own_loop.loop_checks import check_current_device
from tests.distributed.pool import RankPool
from tests.distributed.test_local_updates import LR, Layered, backward

CHOICES = {"period": 3, "warmup_steps": 2, "outer": {"kind": "nesterov", "lr": 0.7, "momentum": 0.9}}


def sgd(*modules: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], LR)


def train_with(parts: Callable[[Layered], list[torch.optim.SGD]]) -> list[torch.Tensor]:
    """Return this replica's parameters after a run in which each optimizer has a `LocalUpdates` of its own."""
    model = Layered()
    optimizers = parts(model)
    loops = [LocalUpdates(model, optimizer, "diloco", **CHOICES) for optimizer in optimizers]
    for step in range(1, 10):
        backward(model, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for loop in loops:
        loop.finish()
        loop.finish()  # the second call does nothing
    return list(model.state_dict().values())


def whole(model: Layered) -> list[torch.optim.SGD]:
    return [sgd(model)]


def in_parts(model: Layered) -> list[torch.optim.SGD]:
    return [sgd(model.layers), sgd(model.embedding, model.head)]


def in_another_order(model: Layered) -> list[torch.optim.SGD]:
    """Return an optimizer whose parameters are in reverse order on the second rank, as those of a set may be."""
    return [torch.optim.SGD(list(model.parameters())[:: -1 if dist.get_rank() else 1], LR)]


@pytest.mark.parametrize("parts", [in_parts, in_another_order])
def test_each_optimizer_has_a_loop_of_its_own_parameters(
    ranks: RankPool, parts: Callable[[Layered], list[torch.optim.SGD]]
) -> None:
    (mine, theirs), expected = (ranks.run(train_with, one, world_size=2) for one in (parts, whole))
    assert all(map(torch.equal, mine, theirs))
    assert all(map(torch.equal, mine, expected[0]))


class Reversed(Layered):
    """Model whose forward pass runs the layers in reverse order."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(inputs)
        for layer in reversed(self.layers):
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 1) -> None:
    backward(model, number)
    optimizer.step()
    optimizer.zero_grad()


def unfreeze() -> None:
    model = Layered()
    model.head.requires_grad_(False)
    optimizer = sgd(model)
    LocalUpdates(model, optimizer, "diloco", **CHOICES)
    step(model, optimizer)
    model.head.requires_grad_(True)
    step(model, optimizer, 2)


def move() -> None:
    model = Layered()
    optimizer = sgd(model)
    LocalUpdates(model, optimizer, "diloco", **CHOICES)
    model.float().double()
    step(model, optimizer)


def move_after_loading() -> None:
    model = Layered()
    optimizer = sgd(model)
    updates = LocalUpdates(model, optimizer, "diloco", **CHOICES)
    updates.load_state_dict(updates.state_dict() | {"step": 5})
    model.float().double()
    step(model, optimizer, 6)


def move_after_a_step() -> None:
    """Move the module within a round, which ends with step 5."""
    model = Layered()
    optimizer = sgd(model)
    LocalUpdates(model, optimizer, "diloco", **CHOICES)
    for number in range(1, 6):
        step(model, optimizer, number)
        if number == 3:
            model.float().double()


def move_before_the_end() -> None:
    model = Layered()
    optimizer = sgd(model)
    updates = LocalUpdates(model, optimizer, "diloco", **CHOICES)
    for number in range(1, 4):
        step(model, optimizer, number)
    model.float().double()
    updates.finish()


def freeze() -> None:
    model = Layered()
    optimizer = sgd(model)
    LocalUpdates(model, optimizer, "diloco", **CHOICES)
    step(model, optimizer)
    model.head.requires_grad_(False)
    step(model, optimizer, 2)


class Wrapper(torch.optim.Optimizer):
    """Optimizer that wraps another one, like Accelerate's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def wrap_the_optimizer() -> None:
    model = Layered()
    LocalUpdates(model, Wrapper(sgd(model)), "diloco", **CHOICES)


def wrap_in_fsdp1() -> None:
    model = FullyShardedDataParallel(Layered(), device_id=torch.device("cpu"))
    LocalUpdates(model, sgd(model), "diloco", **CHOICES)


def leave_out_the_rate() -> None:
    model = Layered()
    optimizer = sgd(model)
    optimizer.param_groups[0]["lr"] = None  # as transformers' Adafactor, which computes its own
    LocalUpdates(model, optimizer, "diloco", **CHOICES)


def use_an_optimizer_without_a_rate() -> None:
    model = Layered()
    LocalUpdates(model, torch.optim.Optimizer(model.parameters(), {"speed": LR}), "diloco", **CHOICES)


def drop_the_rate() -> None:
    model = Layered()
    optimizer = sgd(model)
    LocalUpdates(model, optimizer, "diloco", **CHOICES)
    optimizer.param_groups[0]["lr"] = None
    step(model, optimizer)


def use_complex_numbers() -> None:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    LocalUpdates(model, sgd(model), "diloco", **CHOICES)


def load_the_state_of_the_model() -> None:
    model = Layered()
    LocalUpdates(model, sgd(model), "diloco", **CHOICES).load_state_dict(model.state_dict())


def begin_with_a_rate_that_never_falls() -> None:
    model, rates = Layered(), LRSchedule.create(peak=LR, total_steps=8, kind="constant")
    LocalUpdates(model, sgd(model), "post_local_sgd", lr=rates)


def load_without_error_feedback() -> None:
    model, wire = Layered(), {"kind": "int8", "error_feedback": True}
    state = LocalUpdates(model, sgd(model), "diloco", period=3, warmup_steps=0, wire=wire).state_dict()
    LocalUpdates(model, sgd(model), "diloco", period=3, warmup_steps=0, wire="int8").load_state_dict(state)


def load_for_fewer_parameters() -> None:
    model = Layered()
    state = LocalUpdates(model, sgd(model), "diloco", period=3, warmup_steps=0).state_dict()
    model.head.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], LR)
    LocalUpdates(model, optimizer, "diloco", period=3, warmup_steps=0).load_state_dict(state)


def give_sparse_gradients() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = sgd(model)
    LocalUpdates(model, optimizer, "diloco", **CHOICES)
    model(torch.tensor([1])).sum().backward()
    optimizer.step()


def give_other_layers() -> None:
    LocalUpdates(Layered(), sgd(Layered()), "diloco", layers=Layered().layers, **CHOICES)


def give_another_optimizer() -> None:
    LocalUpdates(Layered(), sgd(Layered()), "diloco", **CHOICES)


def reorder() -> None:
    model = Reversed()
    optimizer = sgd(model)
    LocalUpdates(model, optimizer, "edit", period=1, warmup_steps=0)
    step(model, optimizer)
    step(model, optimizer, 2)


def train_in_evaluation_mode() -> None:
    model = Layered().eval()
    optimizer = sgd(model)
    LocalUpdates(model, optimizer, "edit", period=1, warmup_steps=0)
    step(model, optimizer)
    step(model, optimizer, 2)


def load_another_state() -> None:
    model = Layered()
    state = LocalUpdates(model, sgd(model), "local_sgd", period=3, warmup_steps=0).state_dict()
    LocalUpdates(model, sgd(model), "diloco", period=3, warmup_steps=0).load_state_dict(state)


def give_shards_of_an_unsharded_module() -> None:
    group = dist.new_group([0, 1])
    LocalUpdates(Layered(), sgd(Layered()), "diloco", shards=group, **CHOICES)


def wrap_in_ddp() -> None:
    model = DistributedDataParallel(Layered())
    LocalUpdates(model, sgd(model), "diloco", **CHOICES)


def wrap_in_data_parallel() -> None:
    model = DataParallel(Layered())
    LocalUpdates(model, sgd(model), "diloco", **CHOICES)


def shard_over_replicas_too() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
    model = nn.Linear(4, 2)
    fully_shard(model, mesh=mesh)
    groups = {"replicas": mesh.get_group("replica"), "shards": mesh.get_group("shard")}
    LocalUpdates(model, sgd(model), "diloco", **groups, **CHOICES)


def train_at_own_rates() -> None:
    """Train with learning rates that differ between replicas from step 3 on, under CO2. Its gap penalty divides a late
    mean by a ratio of learning rates."""
    model = Layered()
    optimizer = sgd(model)
    LocalUpdates(model, optimizer, "co2", period=2, warmup_steps=0)
    for number in range(1, 5):
        optimizer.param_groups[0]["lr"] = LR / (1 + dist.get_rank() * (number > 2))
        step(model, optimizer, number)


MISTAKES = {
    unfreeze: "the optimizer has a trainable parameter that is not synchronized",
    move: "the parameters of rest have moved since LocalUpdates was constructed",
    move_after_loading: "the parameters of rest have moved since LocalUpdates was constructed",
    move_after_a_step: "the parameters of rest have moved since LocalUpdates was constructed",
    move_before_the_end: "the parameters of rest have moved since LocalUpdates was constructed",
    freeze: "a parameter was frozen after LocalUpdates was constructed",
    wrap_the_optimizer: "Wrapper has another optimizer inside; give LocalUpdates its .optimizer",
    wrap_in_fsdp1: "the module is sharded with FullyShardedDataParallel",
    leave_out_the_rate: "SGD has no learning rate (lr of its first parameter group), expected a number",
    use_an_optimizer_without_a_rate: "Optimizer has no learning rate (lr of its first parameter group), expected a number",
    drop_the_rate: "SGD has no learning rate (lr of its first parameter group), expected a number",
    use_complex_numbers: "weight is complex, expected a real parameter",
    load_the_state_of_the_model: "the state is not one of LocalUpdates.state_dict()",
    begin_with_a_rate_that_never_falls: "sync.warmup_until_lr is 0.5, a share of the peak to which lr never falls",
    load_without_error_feedback: "the state is of another loop: error_feedback is on there, and off here",
    load_for_fewer_parameters: "the state is of another loop: values is [26, 20, 20] there, and [24, 20, 20] here",
    give_sparse_gradients: "synchronous steps cannot average sparse gradients",
    give_other_layers: "layers contains a module that is not a part of the model",
    give_another_optimizer: "the optimizer has no trainable parameters of the module",
    reorder: "layer 1 runs before layer 0 in this forward pass",
    train_in_evaluation_mode: "the last round was not synchronized, because not all blocks ran in a training forward",
    give_shards_of_an_unsharded_module: "shards has 2 ranks, but the module is not sharded with FSDP2",
    wrap_in_ddp: "the module averages the replicas' gradients in every backward pass; leave out DistributedDataParallel",
    wrap_in_data_parallel: "torch.nn.DataParallel uses all GPUs that a process sees",
    shard_over_replicas_too: "the module averages the replicas' gradients in every backward pass",
    train_at_own_rates: "replicas have different learning rates in step 4 (0.05, 0.025), but these outer steps depend on them",
    load_another_state: "the state is of another loop: method is local_sgd there, and diloco here",
}


def refused(mistake: Callable[[], None]) -> str:
    with pytest.raises(RecipeError) as caught:
        mistake()
    return str(caught.value)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_loop_that_cannot_be_synchronized_is_refused_on_all_ranks(
    ranks: RankPool, mistake: Callable[[], None]
) -> None:
    for said in ranks.run(refused, mistake, world_size=2):
        assert said.startswith(MISTAKES[mistake]) and "\n" not in said


def test_one_of_several_processes_without_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RecipeError, match=r"call torch\.distributed\.init_process_group before LocalUpdates"):
        LocalUpdates(Layered(), sgd(Layered()), "diloco")


def test_a_replica_on_another_gpu_than_the_current_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    check_current_device(torch.device("cuda", 0))
    check_current_device(torch.device("cpu"))
    with pytest.raises(
        RecipeError, match=r"^the parameters are on cuda:1, .* call torch\.cuda\.set_device\(1\) before"
    ):
        check_current_device(torch.device("cuda", 1))
    asked: list[torch.device] = []
    monkeypatch.setattr(local_updates, "check_current_device", asked.append)
    LocalUpdates(model := Layered(), sgd(model), "diloco")
    assert asked == [torch.device("cpu")]


def test_parameters_of_16_bits_are_warned_of() -> None:
    model = Layered().bfloat16()
    with pytest.warns(UserWarning, match=r"^step 0: parameters and anchors are in bfloat16"):
        LocalUpdates(model, sgd(model), "diloco", **CHOICES)


def warnings_at_a_rate(share: float, method: str) -> list[str]:
    """Return this rank's warnings in a loop whose optimizer has `share` of the schedule's constant learning rate."""
    model, rates = Layered(), LRSchedule.create(peak=LR, total_steps=8, kind="constant", warmup_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), share * LR)
    updates = LocalUpdates(
        model, optimizer, method, lr=rates, period={"every": 2} if method == "diloco" else {"alpha": LR}
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(1, 6):
            step(model, optimizer, number)
    updates.finish()
    return [str(one.message) for one in caught]


def test_a_schedule_that_the_optimizer_does_not_have_is_warned_of_once(ranks: RankPool) -> None:
    [first, other] = ranks.run(warnings_at_a_rate, 0.5, "qsr", world_size=2)
    assert [one[:57] for one in first] == ["step 3: the optimizer's learning rate is 0.025, but lr, w"] and other == []
    assert ranks.run(warnings_at_a_rate, 1.0, "qsr", world_size=2) == [[], []]
    assert ranks.run(warnings_at_a_rate, 0.5, "diloco", world_size=2) == [[], []], "nothing in DiLoCo depends on lr"
