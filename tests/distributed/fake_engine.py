"""An engine without a model: blocks of float64 tensors that move by predetermined updates, sharded as FSDP2 shards.

A `Scenario` describes a whole run. `simulate` carries it out on the ranks with the real synchronisation, `replay` in
this process with the oracle; both give what every replica computed with in every step.

Time is simulated too: a replica's clock moves by what the scenario says that its steps take, and by nothing else.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

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
from llmtrain.sync.offload import Copies, offload_copies
from tests.distributed.oracle import Oracle
from tests.distributed.oracle_late import OverlappedOracle, StaleOracle
from tests.distributed.oracle_timed import TimedOracle
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
    """Of the learning rate; its peak is 1."""
    step_seconds: tuple[float, ...] = ()
    """How long each replica's steps take; 1 if empty. Binary fractions keep sums of them exact."""
    delays: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """(step, replica) -> seconds on top."""
    resume_after: int | Collection[int] | None = None
    """After this step, or these, everything is built anew and loaded from the state that was saved."""
    save_after: Collection[int] = ()
    """After these steps the state is saved, and the run goes on."""
    copies: Callable[[torch.device], Copies | None] = offload_copies
    """How anchors are offloaded, if the recipe says that they are."""

    @property
    def rates(self) -> LearningRates:
        return LearningRates(1.0, self.steps, self.schedule)

    def seconds(self, replica: int, step: int) -> float:
        return (self.step_seconds[replica] if self.step_seconds else 1.0) + self.delays.get((step, replica), 0.0)

    def resumes_after(self, step: int) -> bool:
        return step in self.resume_after if isinstance(self.resume_after, Collection) else step == self.resume_after

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

    def direction(self, step: int, replica: int, block: int, parameters: np.ndarray) -> np.ndarray:
        """What a replica's inner step at learning rate 1 adds to a block: [elements]."""
        return self.noise(step, block)[replica] - self.pull * parameters

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
class Clock:
    """Seconds that pass when they are told to."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Answer:
    """What one rank saw of a run."""

    forwards: list[Shards]
    final: Shards
    synchronous_steps: list[int]
    counts: tuple[int, int, int]
    agreed: list[tuple[int, int]]
    says_synchronised: list[bool]
    bytes_sent: float


def replay(scenario: Scenario) -> Trace:
    """The run by the oracle, in this process."""
    start = [scenario.start(block) for block in range(len(scenario.shapes))]
    common = (scenario.sync, scenario.rates, start, scenario.replicas, scenario.direction, scenario.seed)
    kinds = {"stale": StaleOracle, "overlapped": OverlappedOracle}
    if scenario.sync.period.kind == "seconds":
        oracle: Oracle = TimedOracle(*common, seconds=scenario.seconds)
    else:
        oracle = kinds.get(scenario.sync.schedule.kind, Oracle)(*common)
    oracle.run()
    nothing = [[np.full_like(block, np.nan) for block in start]] * scenario.replicas
    forwards = [[np.stack(block) for block in zip(*step, strict=True)] for step in _in_step(oracle.seen, nothing)]
    synchronous = list(range(1, min(oracle.warmup, scenario.steps) + 1))
    counts = (oracle.count, oracle.anomalies, oracle.rollbacks)
    return Trace(forwards, oracle.theta, synchronous, counts, oracle.agreed)


def simulate(ranks: RankPool, scenario: Scenario) -> Trace:
    """The run by `llmtrain.sync`, on as many ranks as the scenario's mesh has."""
    return simulate_all(ranks, [scenario])[0]


def simulate_all(ranks: RankPool, scenarios: Sequence[Scenario]) -> list[Trace]:
    """One after another, on one mesh: what starting costs is paid once."""
    (replicas, shard) = mesh = (scenarios[0].replicas, scenarios[0].shard)
    assert all((scenario.replicas, scenario.shard) == mesh for scenario in scenarios)
    by_rank = ranks.run(_train_on_mesh, list(scenarios), world_size=replicas * shard, timeout=60)
    return [_trace(scenario, answers) for scenario, *answers in zip(scenarios, *by_rank, strict=True)]


def _trace(scenario: Scenario, answers: Sequence[Answer]) -> Trace:
    """One run, from what its ranks saw."""
    first = answers[0]
    for rank, answer in enumerate(answers):
        assert answer.counts == first.counts, f"ranks 0 and {rank} count differently"
        assert answer.synchronous_steps == first.synchronous_steps, f"ranks 0 and {rank} average gradients differently"
        assert [run for _, run in answer.agreed] == [run for _, run in first.agreed], f"ranks 0 and {rank} do not agree"
        assert answer.says_synchronised[-1], f"rank {rank} does not know that the run is over"
    nothing = [[[np.full_like(tensor, np.nan) for tensor in block] for block in answer.final] for answer in answers]
    forwards = [_assemble(scenario, shards) for shards in _in_step([answer.forwards for answer in answers], nothing)]
    final = _assemble(scenario, [answer.final for answer in answers])
    sent = sum(answer.bytes_sent for answer in answers)
    agreed = [answer.agreed for answer in answers[:: scenario.shard]]
    says = [all(said) for said in zip(*(answer.says_synchronised for answer in answers), strict=False)]
    return Trace(forwards, final, first.synchronous_steps, first.counts, agreed, says, sent)


def _in_step(seen: Sequence[list], nothing: Sequence[Any]) -> list[list]:
    """By step instead of by replica or rank; for one that has done fewer steps than another, its `nothing`."""
    steps = max(len(one) for one in seen)
    return [[one[i] if i < len(one) else none for one, none in zip(seen, nothing, strict=True)] for i in range(steps)]


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


def _train_on_mesh(scenarios: Sequence[Scenario]) -> list[Answer]:
    """One rank's runs."""
    mesh = (scenarios[0].replicas, scenarios[0].shard)
    axes = init_device_mesh("cpu", mesh, mesh_dim_names=("replica", "shard"))
    groups = axes.get_group("replica"), axes.get_group("shard")
    return [train(scenario, *(Comms(group) for group in groups), _store_for(scenario.sync)) for scenario in scenarios]


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
    clock = Clock()

    def build() -> tuple[FakeEngine, Method]:
        engine = FakeEngine(scenario, replica.rank, shard.rank, replica.device)
        run = {"seed": scenario.seed, "store": store, "timeout_seconds": 20, "clock": clock}
        with mock.patch("llmtrain.sync.build.offload_copies", scenario.copies):
            return engine, build_method(scenario.sync, engine, replica, shard, scenario.rates, **run)

    def save() -> bytes:
        tensors = {**method.shared_tensors(), **method.own_tensors()}
        return pickle.dumps((engine.blocks, json.dumps(method.state_dict()), tensors))

    engine, method = build()
    forwards, synchronous, agreed, says_synchronised = [], [], [], []
    step = position = 0
    while position < scenario.steps:
        step += 1
        plan = method.begin_step(step, scenario.rates.at(min(step, scenario.steps)))
        if engine.average_gradients:
            synchronous.append(step)
        if plan.computes_gradient:
            forwards.append(engine.forward())
            engine.step(step, plan.lr)
        else:
            forwards.append([engine.computed[block.name] for block in engine.blocks])
        # A replica goes by its first shard rank's clock; those of the others run three times as fast.
        clock.now += scenario.seconds(replica.rank, step) * (3 if shard.rank else 1)
        method.end_step(step)
        run_step = method.agreed_step(step)
        if run_step is not None:
            position = run_step
            agreed.append((step, position))
        if step in scenario.save_after:
            save()
        if scenario.resumes_after(step):
            saved = save()
            method.close()
            clock.now += 1000.0  # what passes while nothing runs does not count
            engine, method = build()
            blocks, state, tensors = pickle.loads(saved)
            for block, values in zip(engine.blocks, blocks, strict=True):
                for tensor, value in zip(block.shards, values.shards, strict=True):
                    tensor.copy_(value)
                engine.publish(block)
            method.load_state_dict(json.loads(state), tensors)
        says_synchronised.append(method.is_synchronised)
    method.finish()
    report = method.report()
    return Answer(
        forwards=forwards,
        final=[engine.computed[block.name] for block in engine.blocks],
        synchronous_steps=synchronous,
        counts=(report.count, report.anomalies, report.rollbacks),
        agreed=agreed,
        says_synchronised=[*says_synchronised, method.is_synchronised],
        bytes_sent=replica.traffic.bytes,
    )
