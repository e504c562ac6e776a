"""Engine without a model: its blocks are float64 tensors that move by predetermined updates, sharded as FSDP2 shards.

A `Scenario` describes a whole run. `train` runs one rank of it with the real synchronization, `replay` runs all of it by the
oracle, and `trace_of` returns what every replica computed with in every step. threads.py runs the ranks.

Time is simulated, too: a replica's clock moves by the seconds that the scenario gives its steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from llmtrain.config import LRScheduleSection, SyncSection
from llmtrain.lr import LRSchedule
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.engine import Block
from llmtrain.sync.anchors import flatten
from llmtrain.sync.build_method import build_method
from llmtrain.sync.method import Method
from llmtrain.sync.methods import METHODS
from llmtrain.sync.offload import StreamOffload, host_offload
from tests.distributed.fake_blocks import cut, drawn, part_of
from tests.distributed.oracle import FIRST_DECAY, SECOND_DECAY, Oracle
from tests.distributed.oracle_late import DelayedOracle, OverlappedOracle, TimedDelayedOracle
from tests.distributed.oracle_timed import TimedOracle
from tests.distributed.trace import Trace

Shapes = tuple[tuple[tuple[int, ...], ...], ...]
"""Shapes of tensors: [block][tensor]."""
SHAPES: Shapes = (((5, 3), (7,)), ((1,), (2, 2, 3), (9,)), ((4, 4),), ((1,), (1, 3)))
"""Shapes of odd sizes. With two shards, the second rank holds nothing of some tensors and nothing at all of the last block."""
SPIKES = {(9, 1, 1): 50.0, (11, 0, 2): float("nan"), **{(13, replica, 3): 50.0 for replica in range(4)}}
"""`scales` of a scenario: an anomalous replica, one that is not finite, and a block in which all replicas are anomalous."""


def choices(method: str, every: int | None = None, **changes: Any) -> SyncSection:
    """Return the `sync` section of a recipe: the method's preset, with rounds of `every` steps and other changes. `penalty` has the
    keys of EDiT's reduction; None selects the plain mean."""
    if every is not None:
        changes["period"] = {"kind": "steps", "every": every}
    if "penalty" in changes:
        penalty = changes.pop("penalty")
        changes["reduction"] = "mean" if penalty is None else {"kind": "edit_penalty", **penalty}
    return SyncSection.model_validate({"method": method, **METHODS[method].PRESET, **changes})


def edit(every: int = 2, **changes: Any) -> SyncSection:
    """Return EDiT's `sync` section with short rounds and no warm-up. Parts of the penalty are off unless `penalty` has them."""
    parts = {"z": None, "temperature": None, "clip": None, "ema": 0.3, "min_rounds": 2}
    penalty = {**parts, **changes.pop("penalty", {})}
    return choices("edit", every, **{"warmup_steps": 0, "penalty": penalty, **changes})


@dataclass(frozen=True)
class Scenario:
    """Run of `steps` steps on `replicas` x `shard` ranks."""

    sync: SyncSection
    replicas: int = 2
    shard: int = 2
    steps: int = 8
    shapes: Shapes = SHAPES
    seed: int = 0
    scales: Mapping[tuple[int, int, int], float] = field(default_factory=dict)
    """Factors on updates, by (step, replica, block)."""
    pull: float = 0.1
    """Strength with which updates also pull toward zero, so that they depend on the result of the last synchronization."""
    schedule: LRScheduleSection = field(default_factory=lambda: LRScheduleSection(kind="constant"))
    """Schedule of the learning rate, whose peak is 1."""
    step_seconds: tuple[float, ...] = ()
    """Seconds per step of each replica; 1 if empty. Binary fractions keep sums of them exact."""
    delays: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Additional seconds of steps, by (step, replica)."""
    resume_after: int | Collection[int] | None = None
    """Step or steps after which everything is built anew and loaded from the saved state."""
    switches_offload: bool = False
    """True if each resumed run reverses the choice of offloading anchors."""
    save_after: Collection[int] = ()
    """Steps after which the state is saved and the run goes on."""
    saves_when_agreed: bool = False
    """True if the state is saved and resumed after steps of the whole run, and only those that all ranks know, as in the trainer.
    Otherwise, each replica counts its own steps."""
    copies: Callable[[torch.device], StreamOffload | None] = host_offload
    """Constructor of the anchors' offload, if the recipe offloads anchors."""
    adapts: bool = False
    """True if the inner optimizer has moments."""
    equal_tokens: bool = False
    """True if all steps of all replicas have the same number of tokens."""

    @cached_property
    def rates(self) -> LRSchedule:
        return LRSchedule(1.0, self.steps, self.schedule)

    def seconds(self, replica: int, step: int) -> float:
        return (self.step_seconds[replica] if self.step_seconds else 1.0) + self.delays.get((step, replica), 0.0)

    def tokens(self, replica: int, step: int) -> int:
        """Return the number of tokens of a replica's step."""
        return 20 if self.equal_tokens else 20 + (7 * replica + 5 * step) % 13

    def tokens_of_rank(self, replica: int, shard_rank: int, step: int) -> int:
        """Return the number of these tokens that a rank has: two, or on the first rank the rest."""
        return 2 if shard_rank else self.tokens(replica, step) - 2 * (self.shard - 1)

    def resumes_after(self, step: int | None) -> bool:
        if step is None:
            return False
        return step in self.resume_after if isinstance(self.resume_after, Collection) else step == self.resume_after

    def size(self, block: int) -> int:
        return len(part_of(self.shapes[block], 1, 0).places)

    def start(self, block: int) -> np.ndarray:
        """Return the initial values of a block: [elements], not to be changed."""
        return drawn((self.seed, block), 1.0, (self.size(block),))

    def noise(self, step: int, block: int) -> np.ndarray:
        """Return the part of each replica's update that does not depend on the parameters: [replicas, elements], not to be
        changed."""
        noise = drawn((self.seed, block, step), 0.1, (self.replicas, self.size(block)))
        if not self.scales:
            return noise
        scales = [self.scales.get((step, replica, block), 1.0) for replica in range(self.replicas)]
        return noise * np.array(scales)[:, None]

    def direction(self, step: int, replica: int, block: int, parameters: np.ndarray) -> np.ndarray:
        """Return what a replica's inner step at learning rate 1 adds to a block: [elements]."""
        return self.noise(step, block)[replica] - self.pull * parameters


class FakeEngine:
    """Interface that synchronization sees of an engine. Forward computes with copies, which `parameters_changed` updates."""

    def __init__(self, scenario: Scenario, replica: int, rank: int, device: torch.device) -> None:
        self.scenario, self.replica, self.rank = scenario, replica, rank
        self._parts = [part_of(shapes, scenario.shard, rank) for shapes in scenario.shapes]
        starts = [scenario.start(i)[part.places] for i, part in enumerate(self._parts)]
        self._flat = [torch.from_numpy(start).to(device) for start in starts]
        self.blocks = [
            Block(f"block {i}", cut(flat, part.shapes))
            for i, (flat, part) in enumerate(zip(self._flat, self._parts, strict=True))
        ]
        self._index = {block.name: i for i, block in enumerate(self.blocks)}
        self._moments = {order: [torch.zeros_like(flat) for flat in self._flat] for order in (1, 2)}
        self.computed: list[np.ndarray] = [np.empty(0)] * len(self.blocks)
        self.average_gradients = True
        self._hooks: list[Callable[[int], None]] = []
        for block in self.blocks:
            self.parameters_changed(block)

    def register_block_hook(self, hook: Callable[[int], None]) -> None:
        self._hooks.append(hook)

    def parameters_changed(self, block: Block) -> None:
        index = self._index[block.name]
        self.computed[index] = self._flat[index].numpy(force=True).copy()

    def forward(self) -> Shards:
        """Return the values with which each block is computed."""
        seen = []
        for index in range(len(self.blocks)):
            for hook in self._hooks:
                hook(index)
            seen.append(self.computed[index])
        return seen

    def step(self, step: int, lr: float = 1.0) -> None:
        """Add `lr` times this replica's update, or the mean update of all replicas while gradients are averaged."""
        for index, (block, flat, part) in enumerate(zip(self.blocks, self._flat, self._parts, strict=True)):
            noise = self.scenario.noise(step, index)
            noise = noise.mean(0) if self.average_gradients else noise[self.replica]
            update = torch.from_numpy(noise[part.places]).to(flat.device) - self.scenario.pull * flat
            if self.scenario.adapts:
                first, second = (self._moments[order][index] for order in (1, 2))
                first.mul_(FIRST_DECAY).add_(update)
                second.mul_(SECOND_DECAY).add_(update**2)
                update = first / (1 + second.sqrt())
            flat += lr * update
            self.parameters_changed(block)

    def moments(self, index: int, order: int) -> list[torch.Tensor]:
        return cut(self._moments[order][index], self._parts[index].shapes)

    def load(self, flat: Sequence[torch.Tensor], moments: Sequence[torch.Tensor]) -> None:
        """Continue from these values, by block, and moments, by order and block. Without moments, the present ones stay."""
        for block, ours, theirs in zip(self.blocks, self._flat, flat, strict=True):
            ours.copy_(theirs)
            self.parameters_changed(block)
        for ours, theirs in zip([*self._moments[1], *self._moments[2]] if moments else [], moments, strict=True):
            ours.copy_(theirs)


Shards = list[np.ndarray]
"""Flat values of this rank's part of each block."""


@dataclass
class Clock:
    """Clock that only moves when `now` is set."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Answer:
    """Observations of one rank during a run."""

    forwards: list[Shards]
    final: Shards
    synchronous_steps: list[int]
    counts: tuple[int, int, int]
    agreed: list[tuple[int, int]]
    says_synchronized: list[bool]
    bytes_sent: float
    squares: tuple[float, float]
    """Squared norms of the last mean and of the distance from it, as in `SyncStats`."""


def replay(scenario: Scenario) -> Trace:
    """Run the scenario by the oracle."""
    start = [scenario.start(block) for block in range(len(scenario.shapes))]
    cuts = [
        [part_of(shapes, scenario.shard, rank).places for rank in range(scenario.shard)] for shapes in scenario.shapes
    ]
    common = (
        scenario.sync,
        scenario.rates,
        start,
        scenario.replicas,
        scenario.direction,
        scenario.seed,
        cuts,
        scenario.tokens,
        scenario.adapts,
    )
    kinds = {"delayed": DelayedOracle, "overlapped": OverlappedOracle}
    if scenario.sync.period.kind == "seconds":
        kind = TimedDelayedOracle if scenario.sync.schedule.kind == "delayed" else TimedOracle
        oracle: Oracle = kind(*common, seconds=scenario.seconds)
    else:
        oracle = kinds.get(scenario.sync.schedule.kind, Oracle)(*common)
    oracle.run()
    nothing = [[np.full_like(block, np.nan) for block in start]] * scenario.replicas
    forwards = [[np.stack(block) for block in zip(*step, strict=True)] for step in _in_step(oracle.seen, nothing)]
    synchronous = list(range(1, min(oracle.warmup, scenario.steps) + 1))
    counts = (oracle.count, oracle.anomalies, oracle.rollbacks)
    squares = oracle.squares if has_spread(scenario) else None
    return Trace(forwards, oracle.theta, synchronous, counts, oracle.agreed, squares=squares)


def has_spread(scenario: Scenario) -> bool:
    """Return whether the schedule reports how far replicas were from their mean."""
    return scenario.sync.schedule.kind in ("blocking", "layerwise")


def trace_of(scenario: Scenario, answers: Sequence[Answer]) -> Trace:
    """Return the trace of one run, assembled from the answers of its ranks."""
    first = answers[0]
    for rank, answer in enumerate(answers):
        assert answer.counts == first.counts, f"ranks 0 and {rank} count differently"
        assert answer.synchronous_steps == first.synchronous_steps, f"ranks 0 and {rank} average gradients differently"
        assert [run for _, run in answer.agreed] == [run for _, run in first.agreed], f"ranks 0 and {rank} do not agree"
        assert answer.says_synchronized[-1], f"rank {rank} does not know that the run is over"
    nothing = [[np.full_like(block, np.nan) for block in answer.final] for answer in answers]
    forwards = [assemble(scenario, shards) for shards in _in_step([answer.forwards for answer in answers], nothing)]
    final = assemble(scenario, [answer.final for answer in answers])
    sent = sum(answer.bytes_sent for answer in answers)
    agreed = [answer.agreed for answer in answers[:: scenario.shard]]
    says = [all(said) for said in zip(*(answer.says_synchronized for answer in answers), strict=False)]
    squares = tuple(np.sum([answer.squares for answer in answers], axis=0)) if has_spread(scenario) else None
    return Trace(forwards, final, first.synchronous_steps, first.counts, agreed, says, sent, squares)


def _in_step(seen: Sequence[list], nothing: Sequence[Any]) -> list[list]:
    """Return the values by step instead of by replica or rank. One that has done fewer steps than another is filled up with its
    `nothing`."""
    steps = max(len(one) for one in seen)
    return [[one[i] if i < len(one) else none for one, none in zip(seen, nothing, strict=True)] for i in range(steps)]


def assemble(scenario: Scenario, by_rank: Sequence[Shards]) -> list[np.ndarray]:
    """Assemble blocks as [replicas, elements] from the shards of all ranks, which count shards innermost."""
    whole = []
    for block, shapes in enumerate(scenario.shapes):
        values = np.empty((scenario.replicas, scenario.size(block)))
        for rank, shards in enumerate(by_rank):
            replica, shard = divmod(rank, scenario.shard)
            values[replica, part_of(shapes, scenario.shard, shard).places] = shards[block]
        whole.append(values)
    return whole


def meeting_store() -> dist.Store:
    """Return a store that all ranks of the process group share. All of them must call this function."""
    rank, port = dist.get_rank(), [0]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    if store is not None:
        port[0] = store.port
    dist.broadcast_object_list(port)
    store = store or dist.TCPStore("127.0.0.1", port[0], is_master=False)
    dist.barrier()
    return store


Saved = tuple[list[torch.Tensor], list[torch.Tensor], str, dict[str, list]]
"""Content of a checkpoint: parameters, moments, plain values and tensors."""


def save(engine: FakeEngine, method: Method) -> Saved:
    tensors = {**method.shared_state(), **method.per_replica_state()}
    kept = {name: [None if one is None else one.clone() for one in many] for name, many in tensors.items()}
    moments = [flat.clone() for order in (1, 2) for flat in engine._moments[order]]
    return [flatten(block) for block in engine.blocks], moments, json.dumps(method.state_dict()), kept


def load(engine: FakeEngine, method: Method, saved: Saved) -> None:
    parameters, moments, state, tensors = saved
    engine.load(parameters, moments)
    method.load_state_dict(json.loads(state), tensors)


def train(scenario: Scenario, replica: Comms, shard: Comms, store: dist.Store | None = None) -> Answer:
    """Run the scenario on this rank of the given axes. `step` counts this replica's own steps. `global_step` is the step of the
    whole run that all ranks knew last; in timed rounds the two differ."""
    clock, sync = Clock(), scenario.sync

    def build() -> tuple[FakeEngine, Method]:
        engine = FakeEngine(scenario, replica.rank, shard.rank, replica.device)
        run = {"seed": scenario.seed, "store": store, "timeout_seconds": 20, "clock": clock}
        return engine, build_method(sync, engine, replica, shard, scenario.rates, offload_of=scenario.copies, **run)

    engine, method = build()
    forwards, synchronous, agreed, says_synchronized = [], [], [], []
    step = global_step = 0
    while global_step < scenario.steps:
        step += 1
        plan = method.begin_step(step, scenario.rates.at(min(step, scenario.steps)))
        if engine.average_gradients:
            synchronous.append(step)
        if plan.computes_gradient:
            forwards.append(engine.forward())
            engine.step(step, plan.lr)
        else:
            forwards.append(list(engine.computed))
        # A replica goes by the clock of its first shard rank. The clocks of its other ranks run three times as fast.
        clock.now += scenario.seconds(replica.rank, step) * (3 if shard.rank else 1)
        method.end_step(step, scenario.tokens_of_rank(replica.rank, shard.rank, step))
        agreed_step = method.agreed_step(step)
        if agreed_step is not None:
            global_step = agreed_step
            agreed.append((step, global_step))
        moment = agreed_step if scenario.saves_when_agreed else step
        if moment in scenario.save_after:
            save(engine, method)
        if scenario.resumes_after(moment):
            saved, staleness = save(engine, method), method.schedule.staleness
            method.close()
            clock.now += 1000.0  # time that passes while nothing runs must not count
            if scenario.switches_offload:
                sync = sync.model_copy(update={"offload": not sync.offload})
            engine, method = build()
            load(engine, method, saved)
            if not scenario.sync.period.is_timed:  # timed messages hold only the mean steps
                assert method.schedule.staleness == staleness
        says_synchronized.append(method.is_synchronized)
    method.finish()
    stats = method.stats
    return Answer(
        forwards=forwards,
        final=list(engine.computed),
        synchronous_steps=synchronous,
        counts=(stats.count, stats.anomalies, stats.rollbacks),
        agreed=agreed,
        says_synchronized=[*says_synchronized, method.is_synchronized],
        bytes_sent=replica.traffic.bytes,
        squares=(float(stats.mean_squared), float(stats.spread_squared)),
    )
