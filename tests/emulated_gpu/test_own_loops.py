"""`LocalUpdates` on GPUs, in groups of one's own."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from llmtrain.sync import LocalUpdates
from tests.distributed.pool import RankPool

pytestmark = pytest.mark.deep


def train_over_gloo_and_nccl(steps: int) -> list[torch.Tensor]:
    """DES-LOC with averaged moments. gloo joins two replicas, and NCCL alone the two shards of each."""
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
