"""A few steps of a tiny model under a real engine, on the ranks of the pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.config import ModelSection, OptimSection, ParallelSection, ScheduleSection, SyncSection
from llmtrain.lr import LearningRates
from llmtrain.model import build, model_config
from llmtrain.parallel.build import build_engine
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.mesh import Mesh, build_mesh
from llmtrain.parallel.world import World
from llmtrain.sync.anchors import flatten
from llmtrain.sync.build import build_method
from llmtrain.sync.method import Method
from tests.distributed.fake_engine import choices, meeting_store

VOCABULARY, LENGTH = 61, 16
LLAMA = ModelSection(
    type="llama", config={"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
)
GPT_NEO = ModelSection(
    type="gpt_neo",
    config={
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
    },
)


@dataclass(frozen=True)
class Case:
    """One small training run."""

    sync: SyncSection = field(default_factory=lambda: choices("synchronous"))
    replicas: int = 1
    shard: int = 1
    model: ModelSection = LLAMA
    parallel: dict[str, Any] = field(default_factory=lambda: {"precision": "fp32"})
    optim: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2})
    steps: int = 6
    global_batch: int = 8
    micro_batch: int = 2
    same_data: bool = False
    """Every replica gets the same batches."""
    device: str = "cpu"
    """Where all ranks compute; a GPU is shared by all of them, so each is a replica of its own."""
    network: str = "gloo"
    """Between replicas. NCCL needs a GPU for each rank."""


@dataclass
class Outcome:
    """What one rank saw."""

    losses: list[float]
    """Mean over all ranks, of each step in which somebody computed a gradient."""
    norms: list[float]
    weights: dict[str, torch.Tensor]
    """This rank's shards after `finish`, by parameter."""
    rounds: int
    master_dtype: torch.dtype


def mesh_of(replicas: int, shard: int, device: str = "cpu", network: str = "gloo") -> Mesh:
    """A mesh over the first ranks of the pool's process group."""
    world = World(dist.get_rank(), replicas * shard, dist.get_rank(), replicas * shard)
    return build_mesh(world, torch.device(device), replicas, shard, network, timedelta(seconds=60))


def build_case(case: Case, mesh: Mesh, clock: Callable[[], float] = time.monotonic) -> tuple[Engine, Method]:
    """Engine and method of a case."""
    model = build(model_config(case.model, VOCABULARY), loss_chunk=11)
    rates = LearningRates(case.optim["lr"], case.steps, ScheduleSection(kind="constant"))
    parallel, in_forward = ParallelSection(**case.parallel), case.sync.schedule.kind == "layerwise"
    optim = OptimSection(**case.optim)
    engine = build_engine(model, mesh, parallel, optim, seed=3, changes_in_forward=in_forward)
    store = meeting_store() if case.sync.schedule.kind == "wait_avoiding" else None
    method = build_method(
        case.sync,
        engine,
        mesh.replica,
        mesh.shard,
        rates,
        seed=3,
        compiled=parallel.compile,
        store=store,
        clock=clock,
        timeout_seconds=60,
    )
    return engine, method


def micro_batches(case: Case, mesh: Mesh, step: int) -> list[torch.Tensor]:
    """This rank's part of a global batch that is the same on every mesh."""
    generator = torch.Generator().manual_seed(step)
    batch = torch.randint(0, VOCABULARY, (case.global_batch, LENGTH + 1), generator=generator) % 17
    parts = case.replicas * case.shard
    part = mesh.shard.rank if case.same_data else mesh.world.rank
    mine = batch.chunk(case.shard if case.same_data else parts)[part]
    return list(mine.split(case.micro_batch))


def train(cases: list[Case]) -> list[Outcome]:
    """Run the cases one after another on this rank; all have the same number of ranks."""
    return [_train(case) for case in cases]


def _train(case: Case) -> Outcome:
    mesh = mesh_of(case.replicas, case.shard, case.device, case.network)
    losses, norms = [], []
    engine, method = build_case(case, mesh, clock=lambda: step)  # a second a step
    for step in range(1, case.steps + 1):
        batches = micro_batches(case, mesh, step)
        plan = method.begin_step(step, case.optim["lr"])
        loss = torch.zeros(())
        if plan.computes_gradient:
            loss = engine.forward_backward(batches)
            norms.append(float(engine.step(plan.lr)))
        method.end_step(step)
        tokens = sum(batch.shape[0] for batch in batches) * LENGTH * plan.computes_gradient
        totals = torch.tensor([float(loss), tokens], dtype=torch.float64)
        loss, tokens = mesh.everyone.all_reduce(totals).wait().tolist()
        if tokens:
            losses.append(loss / tokens)
    method.finish()
    # Not the whole weights: DTensor caches the groups of earlier meshes, which the pool has destroyed.
    shards = {
        name: rows.to_local().to("cpu", copy=True)
        for block in engine.blocks
        for name, rows in engine.as_sharded(block, flatten(block)).items()
    }
    return Outcome(losses, norms, shards, method.report().count, engine.blocks[0].shards[0].dtype)
