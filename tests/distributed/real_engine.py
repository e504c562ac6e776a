"""Steps of a tiny model under a real engine, on the ranks of the pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.config import LRScheduleSection, ModelSection, OptimSection, ParallelSection, SyncSection
from llmtrain.lr import LRSchedule
from llmtrain.model import build, model_config
from llmtrain.parallel.build_engine import build_engine
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.engine_parts import EngineParts
from llmtrain.parallel.mesh import Mesh, build_mesh
from llmtrain.parallel.world import World
from llmtrain.sync.anchors import flatten
from llmtrain.sync.build_method import build_method
from llmtrain.sync.method import Method
from llmtrain.sync.offload import StreamOffload, host_offload
from tests.distributed.fake_engine import choices, meeting_store
from tests.distributed.pool import RankPool

VOCABULARY, LENGTH, SEED = 61, 16, 3
LLAMA = ModelSection(
    type="llama", config={"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
)
TIED = LLAMA.model_copy(update={"config": {**LLAMA.config, "tie_word_embeddings": True}})
GPT_NEO = ModelSection(
    type="gpt_neo",
    config={
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
        "max_position_embeddings": 2 * LENGTH,  # each layer makes masks of this size squared
    },
)


@dataclass(frozen=True)
class Case:
    """Small training run."""

    sync: SyncSection = field(default_factory=lambda: choices("synchronous"))
    replicas: int = 1
    shard: int = 1
    model: ModelSection = LLAMA
    parallel: dict[str, Any] = field(default_factory=lambda: {"precision": "fp32"})
    optim: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2})
    schedule: LRScheduleSection = field(default_factory=lambda: LRScheduleSection(kind="constant"))
    steps: int = 6
    global_batch: int = 8
    micro_batch: int = 2
    same_data: bool = False
    """True if every replica gets the same batches."""
    device: str = "cpu"
    """Device of all ranks. If it is a GPU, all ranks share it, and each is a replica of its own."""
    network: str = "gloo"
    """Backend between replicas. NCCL needs one GPU per rank."""
    copies: Callable[[torch.device], StreamOffload | None] = host_offload
    """Constructor of the anchors' offload, if the recipe offloads anchors."""

    @property
    def rates(self) -> LRSchedule:
        return LRSchedule(self.optim["lr"], self.steps, self.schedule)


@dataclass
class Outcome:
    """Results of one rank."""

    losses: list[float]
    """Mean over all ranks, of each step in which at least one computed a gradient."""
    norms: list[float]
    weights: dict[str, torch.Tensor]
    """This rank's shards after `finish`, by parameter."""
    rounds: int
    master_dtype: torch.dtype


def mesh_of(replicas: int, shard: int, device: str = "cpu", network: str = "gloo") -> Mesh:
    """Return a mesh over the first ranks of the pool's process group."""
    world = World(dist.get_rank(), replicas * shard, dist.get_rank(), replicas * shard)
    return build_mesh(
        world,
        torch.device(device),
        replicas=replicas,
        shards=shard,
        replica_backend=network,
        timeout=timedelta(seconds=60),
    )


def build_case(case: Case, mesh: Mesh, clock: Callable[[], float] = time.monotonic) -> tuple[Engine, Method]:
    """Return the engine and the method of a case."""
    model = build(model_config(case.model, VOCABULARY), loss_chunk=11)
    parallel, in_forward = ParallelSection(**case.parallel), case.sync.schedule.kind == "layerwise"
    optim = OptimSection(**case.optim)
    parts = EngineParts(
        model=model,
        mesh=mesh,
        parallel=parallel,
        optim=optim,
        seed=SEED,
        changes_in_forward=in_forward,
        sends_while_training=case.sync.schedule.sends_while_training,
    )
    engine = build_engine(parts)
    store = meeting_store() if case.sync.schedule.kind == "wait_avoiding" else None
    method = build_method(
        case.sync,
        engine,
        mesh.replica_comms,
        mesh.shard_comms,
        case.rates,
        seed=SEED,
        compiled=parallel.compile,
        store=store,
        clock=clock,
        timeout_seconds=60,
        offload_of=case.copies,
    )
    return engine, method


def global_batch(case: Case, step: int) -> torch.Tensor:
    """Return the batch that all ranks together read in a step. It is the same on every mesh."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (case.global_batch, LENGTH + 1), generator=generator) % 17


def micro_batches(case: Case, mesh: Mesh, step: int) -> list[torch.Tensor]:
    """Return this rank's part of a global batch."""
    parts = case.replicas * case.shard
    part = mesh.shard_comms.rank if case.same_data else mesh.world.rank
    mine = global_batch(case, step).chunk(case.shard if case.same_data else parts)[part]
    return list(mine.split(case.micro_batch))


@dataclass
class Run:
    """Engine and method of a case on this rank, and the results of its steps so far."""

    case: Case
    mesh: Mesh
    step: int = 0
    sums: list[list[float]] = field(default_factory=list)
    """Sum of the losses of this rank's tokens, and the number of these tokens, of each step."""
    norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seconds = self.step  # each step takes one second
        self.engine, self.method = build_case(self.case, self.mesh, clock=lambda: self.seconds)

    def train(self, until: int) -> None:
        """Train up to and including step `until`."""
        while self.step < until:
            self.step += 1
            self._train_step()

    def _train_step(self) -> None:
        batches = micro_batches(self.case, self.mesh, self.step)
        plan = self.method.begin_step(self.step, self.case.rates.at(self.step))
        loss = torch.zeros(())
        if plan.computes_gradient:
            loss = self.engine.forward_backward(batches)
            self.norms.append(float(self.engine.step(plan.lr)))
        self.seconds += 1
        self.method.end_step(self.step)
        tokens = sum(batch.shape[0] for batch in batches) * LENGTH * plan.computes_gradient
        self.sums.append([float(loss), tokens])

    def losses(self) -> list[float]:
        """Return the loss of each step in which at least one rank computed a gradient. All ranks must call this function.

        There is no collective in each step, because replicas that only pull would wait in it for replicas that ZeRO-3 makes wait
        for their next forward pass.
        """
        sums = self.mesh.all_ranks.all_reduce(torch.tensor(self.sums, dtype=torch.float64)).tolist()
        return [loss / tokens for loss, tokens in sums if tokens]

    def finish(self) -> Outcome:
        """Synchronize for the last time, and return the results."""
        self.method.finish()
        # Shards, not whole weights, because DTensor caches the groups of earlier meshes, which the pool has destroyed.
        shards = {
            name: rows.to_local().to("cpu", copy=True)
            for block in self.engine.blocks
            for name, rows in self.engine.to_dtensors(block, flatten(block)).items()
        }
        dtype, rounds = self.engine.blocks[0].shards[0].dtype, self.method.stats.count
        return Outcome(self.losses(), self.norms, shards, rounds, dtype)


def train(cases: list[Case]) -> list[Outcome]:
    """Run the cases one after another on this rank. All have the same number of ranks."""
    outcomes = []
    for case in cases:
        run = Run(case, mesh_of(case.replicas, case.shard, case.device, case.network))
        run.train(case.steps)
        outcomes.append(run.finish())
    return outcomes


def zero_pool(size: int) -> RankPool:
    """Return a separate pool for DeepSpeed, which keeps much global state. Its ranks have already built a first engine, which takes
    seconds."""
    pool = RankPool(size)
    parallel = {"precision": "fp32", "engine": "zero", "zero_stage": 3}
    pool.run(train, [Case(shard=size, steps=1, global_batch=2 * size, parallel=parallel)])
    return pool
