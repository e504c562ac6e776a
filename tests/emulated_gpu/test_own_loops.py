"""Tests of `LocalUpdates` on GPUs: with process groups of the caller, and in the examples."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from examples import fsdp2_loop, plain_loop, transformers_trainer
from llmtrain.sync import LocalUpdates
from tests.distributed.pool import RankPool
from tests.distributed.test_examples import parameters_of
from tests.emulated_gpu.as_cuda import COUNT

pytestmark = pytest.mark.deep


def train_over_gloo_and_nccl(steps: int) -> list[torch.Tensor]:
    """Train with DES-LOC, where gloo joins two replicas, and NCCL alone joins the two shards of each. Return this
    rank's parameters and averaged first moments."""
    limit = timedelta(seconds=60)
    pairs = {
        name: [dist.new_group(list(ranks), backend=name, timeout=limit) for ranks in both]
        for name, both in GROUPS.items()
    }
    replicas, shards = pairs["gloo"][dist.get_rank() % 2], pairs["nccl"][dist.get_rank() // 2]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().to("cuda")
    fully_shard(model, mesh=DeviceMesh.from_group(shards, "cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    groups, moments = {"replicas": replicas, "shards": shards}, {"first": 1, "second": 1}
    updates = LocalUpdates(model, optimizer, "des_loc", **groups, period=2, moments=moments)
    for step in range(1, steps + 1):
        drawn = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model(torch.randn(5, 3, generator=drawn, dtype=torch.float64).to("cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    updates.finish()
    first = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
    return [tensor.to_local().cpu() for tensor in [*(one.detach() for one in model.parameters()), *first]]


GROUPS = {"gloo": ((0, 2), (1, 3)), "nccl": ((0, 1), (2, 3))}


def test_shards_that_only_nccl_joins(gpu_ranks: RankPool) -> None:
    found = gpu_ranks.run(train_over_gloo_and_nccl, 4)
    for one, other in ((0, 2), (1, 3)):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[one], found[other], strict=True))


def train_with_the_gpu_as_default_device(method: str, choices: dict[str, Any]) -> list[torch.Tensor]:
    """Train as a user who has called torch.set_default_device, and return the parameters."""
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        updates = LocalUpdates(model, optimizer, method, **choices)
        for step in range(8):
            model(torch.full((8, 4), step + dist.get_rank() / 2)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        updates.finish()
    finally:
        torch.set_default_device(None)
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("method", "choices"),
    [
        ("diloco", {"period": 3, "warmup_steps": 2}),
        ("diloco", {"period": 3, "reduction": "median_norm", "offload": True}),
        ("edit", {"period": 3, "warmup_steps": 0, "schedule": "blocking"}),
        ("des_loc", {"period": 2, "moments": {"first": 1, "second": 2}}),
    ],
)
def test_the_default_device_may_be_the_gpu(gpu_ranks: RankPool, method: str, choices: dict[str, Any]) -> None:
    one, other = gpu_ranks.run(train_with_the_gpu_as_default_device, method, choices, world_size=2)
    assert all(map(torch.equal, one, other))


def train_example(main: Callable[[], nn.Module], seen: dict[str, str]) -> tuple[list[str], list[torch.Tensor]]:
    """Run an example, and return (devices of its parameters, the parameters). `seen` may set the number of GPUs."""
    with mock.patch.dict(os.environ, {"LOCAL_RANK": str(dist.get_rank()), **seen}):
        model = main()
    parameters = parameters_of(model)
    torch.cuda.set_device(0)
    return sorted({str(one.device) for one in parameters}), [one.cpu() for one in parameters]


def test_examples_on_gpus(gpu_ranks: RankPool, tmp_path: Path) -> None:
    plain, sharded = partial(plain_loop.main, 25), partial(fsdp2_loop.main, 8)
    trainer = partial(transformers_trainer.main, str(tmp_path), 18)
    for main, seen, size, devices in (
        (plain, {}, 2, ["cuda:0", "cuda:1"]),
        (sharded, {}, 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (trainer, {COUNT: "1"}, 2, ["cuda:0", "cuda:0"]),  # as with torchrun --virtual-local-rank
    ):
        found = gpu_ranks.run(train_example, main, seen, world_size=size)
        assert [where for where, _ in found] == [[device] for device in devices]
        for (_, one), (_, other) in zip(found[: size // 2], found[size // 2 :], strict=True):
            assert all(map(torch.equal, one, other))
