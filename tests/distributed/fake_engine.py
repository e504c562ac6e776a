"""An engine without a model: blocks of float64 tensors that move by predetermined updates, sharded as FSDP2 shards.

A `Scenario` describes a whole run. `simulate` carries it out on the ranks with the real synchronisation, `replay` in
this process with the oracle; both give what every replica computed with in every step.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from llmtrain.config import ScheduleSection, SyncSection
from llmtrain.lr import LearningRates
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.engine import Block
from llmtrain.sync.build import build_method
from llmtrain.sync.method import Method
from llmtrain.sync.methods import METHODS
from tests.distributed.oracle import Oracle
from tests.distributed.pool import RankPool
from tests.distributed.trace import Trace

Shapes = tuple[tuple[tuple[int, ...], ...], ...]
"""[block][tensor] -> shape."""
SHAPES: Shapes = (((5, 3), (7,)), ((1,), (2, 2, 3), (9,)), ((4, 4),), ((1,), (1, 3)))
"""Odd sizes; with two shards, the second rank holds nothing of some tensors and nothing at all of the last block."""


def choices(method: str, every: int | None = None, **changes: Any) -> SyncSection:
    """The `sync` section of a recipe: the method's preset, rounds of `every` steps, other changes laid over it."""
    if every is not None:
        changes["period"] = {"kind": "steps", "every": every}
    return SyncSection.model_validate({"method": method, **METHODS[method].PRESET, **changes})


def edit(every: int = 2, **changes: Any) -> SyncSection:
    """EDiT with short rounds and no warm-up; `penalty` starts with every part switched off."""
    parts = {"z": None, "temperature": None, "clip": None, "ema": 0.3, "min_rounds": 2}
    penalty = {**parts, **changes.pop("penalty", {})}
    return choices("edit", every, **{"warmup_steps": 0, "penalty": penalty, **changes})


@dataclass(frozen=True)
class Scenario:
    """A run: `steps` steps of `replicas` x `shard` ranks."""

    sync: SyncSection
    replicas: int = 2
    shard: int = 2
    steps: int = 8
    shapes: Shapes = SHAPES
    seed: int = 0
    scales: Mapping[tuple[int, int, int], float] = field(default_factory=dict)
    """(step, replica, block) -> factor on that update."""
    pull: float = 0.1
    """Updates also pull towards zero, so that they depend on what the last synchronisation left."""
    schedule: ScheduleSection = field(default_factory=lambda: ScheduleSection(kind="constant"))
    """Of the learning rate, which only a period may look at; its peak is 1."""
    resume_after: int | None = None
    """After this step everything is built anew and loaded from the state that was saved."""

    @property
    def rates(self) -> LearningRates:
        return LearningRates(1.0, self.steps, self.schedule)

    def size(self, block: int) -> int:
        return sum(math.prod(shape) for shape in self.shapes[block])

    def start(self, block: int) -> np.ndarray:
        """Initial values: [elements]."""
        return np.random.default_rng((self.seed, block)).normal(size=self.size(block))

    def noise(self, step: int, block: int) -> np.ndarray:
        """The part of each replica's update that does not depend on the parameters: [replicas, elements]."""
        drawn = np.random.default_rng((self.seed, block, step)).normal(0.0, 0.1, (self.replicas, self.size(block)))
        scales = [self.scales.get((step, replica, block), 1.0) for replica in range(self.replicas)]
        return drawn * np.array(scales)[:, None]

    def shards(self, block: int, flat: np.ndarray, rank: int) -> list[torch.Tensor]:
        """What a shard rank holds of a block: dimension 0 in equal pieces, the last ones shorter or empty."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes[block]])
        tensors = [
            part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), self.shapes[block], strict=True)
        ]
        pieces = [math.ceil(len(tensor) / self.shard) for tensor in tensors]
        return [torch.tensor(t[rank * n : (rank + 1) * n]) for t, n in zip(tensors, pieces, strict=True)]


class FakeEngine:
    """What synchronisation sees of an engine. Forward computes with copies that follow when `publish` is called."""

    def __init__(self, scenario: Scenario, replica: int, rank: int, device: torch.device) -> None:
        self.scenario, self.replica, self.rank = scenario, replica, rank
        starts = [scenario.shards(i, scenario.start(i), rank) for i in range(len(scenario.shapes))]
        self.blocks = [Block(f"block {i}", [shard.to(device) for shard in start]) for i, start in enumerate(starts)]
        self.computed: dict[str, list[np.ndarray]] = {}
        self.average_gradients = True
        self._hooks: list[Callable[[int], None]] = []
        for block in self.blocks:
            self.publish(block)

    def before_block(self, hook: Callable[[int], None]) -> None:
        self._hooks.append(hook)

    def publish(self, block: Block) -> None:
        self.computed[block.name] = [shard.numpy(force=True).copy() for shard in block.shards]

    def forward(self) -> Shards:
        """What each block is computed with."""
        seen = []
        for index, block in enumerate(self.blocks):
            for hook in self._hooks:
                hook(index)
            seen.append(self.computed[block.name])
        return seen

    def step(self, step: int, lr: float = 1.0) -> None:
        """Add `lr` x this replica's update, or the mean of all replicas' while gradients are averaged."""
        for index, block in enumerate(self.blocks):
            noise = self.scenario.noise(step, index)
            noise = noise.mean(0) if self.average_gradients else noise[self.replica]
            for shard, part in zip(block.shards, self.scenario.shards(index, noise, self.rank), strict=True):
                shard += lr * (part.to(shard.device) - self.scenario.pull * shard)
            self.publish(block)


Shards = list[list[np.ndarray]]
"""[block][tensor] -> this rank's part."""


@dataclass
class Answer:
    """What one rank saw of a run."""

    forwards: list[Shards]
    final: Shards
    synchronous_steps: list[int]
    counts: tuple[int, int, int]
    bytes_sent: float


def replay(scenario: Scenario) -> Trace:
    """The run by the oracle, in this process."""
    blocks = range(len(scenario.shapes))
    oracle = Oracle(scenario.sync, [scenario.start(block) for block in blocks], scenario.replicas)
    forwards = []
    for step in range(1, scenario.steps + 1):
        oracle.forward()
        forwards.append([theta.copy() for theta in oracle.theta])
        noise = [scenario.noise(step, block) for block in blocks]
        oracle.end_step(step, [n - scenario.pull * theta for n, theta in zip(noise, oracle.theta, strict=True)])
    oracle.finish()
    synchronous = [step for step in range(1, scenario.steps + 1) if oracle.is_synchronous(step)]
    return Trace(forwards, oracle.theta, synchronous, (oracle.count, oracle.anomalies, oracle.rollbacks))


def simulate(ranks: RankPool, scenario: Scenario) -> Trace:
    """The run by `llmtrain.sync`, on as many ranks as the scenario's mesh has."""
    answers = ranks.run(_train_on_mesh, scenario, world_size=scenario.replicas * scenario.shard, timeout=60)
    first = answers[0]
    for rank, answer in enumerate(answers):
        assert answer.counts == first.counts, f"ranks 0 and {rank} count differently"
        assert answer.synchronous_steps == first.synchronous_steps, f"ranks 0 and {rank} average gradients differently"
    forwards = [_assemble(scenario, shards) for shards in zip(*(answer.forwards for answer in answers), strict=True)]
    final = _assemble(scenario, [answer.final for answer in answers])
    sent = sum(answer.bytes_sent for answer in answers)
    return Trace(forwards, final, first.synchronous_steps, first.counts, sent)


def _assemble(scenario: Scenario, by_rank: Sequence[Shards]) -> list[np.ndarray]:
    """Blocks as [replicas, elements] from every rank's shards; ranks count shards innermost."""
    whole = []
    for block, shapes in enumerate(scenario.shapes):
        replicas = []
        for first in range(0, len(by_rank), scenario.shard):
            owners = by_rank[first : first + scenario.shard]
            tensors = [np.concatenate([owner[block][tensor] for owner in owners]) for tensor in range(len(shapes))]
            replicas.append(np.concatenate([tensor.reshape(-1) for tensor in tensors]))
        whole.append(np.stack(replicas))
    return whole


def _train_on_mesh(scenario: Scenario) -> Answer:
    """One rank's run."""
    axes = init_device_mesh("cpu", (scenario.replicas, scenario.shard), mesh_dim_names=("replica", "shard"))
    return train(scenario, Comms(axes.get_group("replica")), Comms(axes.get_group("shard")), _store_for(scenario.sync))


def _store_for(sync: SyncSection) -> dist.Store | None:
    return meeting_store() if sync.schedule.kind == "wait_avoiding" else None


def meeting_store() -> dist.Store:
    """A store that all ranks of the process group share. A collective of all ranks."""
    rank, port = dist.get_rank(), [0]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    if store is not None:
        port[0] = store.port
    dist.broadcast_object_list(port)
    store = store or dist.TCPStore("127.0.0.1", port[0], is_master=False)
    dist.barrier()
    return store


def train(scenario: Scenario, replica: Comms, shard: Comms, store: dist.Store | None = None) -> Answer:
    """The run of this rank of the given axes."""

    def build() -> tuple[FakeEngine, Method]:
        engine = FakeEngine(scenario, replica.rank, shard.rank, replica.device)
        method = build_method(
            scenario.sync, engine, replica, shard, scenario.rates, seed=scenario.seed, store=store, timeout_seconds=20
        )
        return engine, method

    engine, method = build()
    forwards, synchronous = [], []
    for step in range(1, scenario.steps + 1):
        plan = method.begin_step(step, scenario.rates.at(step))
        if engine.average_gradients:
            synchronous.append(step)
        if plan.computes_gradient:
            forwards.append(engine.forward())
            engine.step(step, plan.lr)
        else:
            forwards.append([engine.computed[block.name] for block in engine.blocks])
        method.end_step(step)
        if step == scenario.resume_after:
            tensors = {**method.shared_tensors(), **method.own_tensors()}
            saved = pickle.dumps((engine.blocks, method.state_dict(), tensors))
            method.close()
            engine, method = build()
            blocks, state, tensors = pickle.loads(saved)
            for block, values in zip(engine.blocks, blocks, strict=True):
                for tensor, value in zip(block.shards, values.shards, strict=True):
                    tensor.copy_(value)
                engine.publish(block)
            method.load_state_dict(state, tensors)
    method.finish()
    report = method.report()
    return Answer(
        forwards=forwards,
        final=[engine.computed[block.name] for block in engine.blocks],
        synchronous_steps=synchronous,
        counts=(report.count, report.anomalies, report.rollbacks),
        bytes_sent=replica.traffic.bytes,
    )
