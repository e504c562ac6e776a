"""Oracle of WAGMA in NumPy float64, on the models W' themselves as in the paper: no threads, no shards. Beyond the paper, the
average of all replicas may go through an outer step.

The caller says which replicas are late, and how old their models are. The oracle takes nothing of `llmtrain.sync`. wagma_runs.py
makes replicas late in the real method.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from llmtrain.config import AverageSection, OuterSection
from tests.distributed.fake_engine import Scenario
from tests.distributed.oracle_outer import displacement_of, unit_of

Blocks = list[np.ndarray]
"""Values of each block: [replicas, elements]."""
Lateness = Mapping[tuple[int, int], int]
"""Age, in iterations, of the model that a late replica contributes, by (iteration, replica). Replicas on time have no entry."""
PATIENCE = 20.0
"""Seconds after which a wait that should be short is a failure."""


class WagmaOracle:
    """Replicas that start equal. `step` is called in every iteration (from 0), `finish` at the end. `theta` has the models."""

    def __init__(
        self,
        start: list[np.ndarray],
        replicas: int,
        size: int,
        late: Lateness,
        globals_: Collection[int],
        outer: OuterSection | None = None,
    ):
        """Create the replicas. `start` has [elements] for each block. All replicas average after the iterations in `globals_`."""
        self.replicas, self.size, self.late, self.globals = replicas, size, late, globals_
        self.outer = outer or AverageSection()
        self.momentum = [np.zeros_like(block) for block in start]
        self.lrs: list[float] = []
        """Learning rates of the round so far."""
        self.theta: Blocks = [np.repeat(block[None], replicas, axis=0) for block in start]
        self.finished: dict[int, Blocks] = {-1: self.theta}
        """W' of all replicas by iteration; after a global iteration, the average."""
        self.last_global = -1
        self.iteration = 0
        self.count = 0
        self.farthest = 0.0
        """Largest element of any replica's distance from the last global average."""

    def step(self, updates: Callable[[Blocks], Blocks], lr: float = 1.0) -> None:
        """Take the local step of every replica (`updates` of the present models), and then average."""
        self.lrs.append(lr)
        self.theta = [theta + update for theta, update in zip(self.theta, updates(self.theta), strict=True)]
        self.finished[self.iteration] = self.theta
        common = self.finished[self.last_global]
        distances = (np.abs(ours - theirs).max() for ours, theirs in zip(self.theta, common, strict=True))
        self.farthest = max(self.farthest, *distances)
        if self.iteration in self.globals:
            self._average_all()
        else:
            self._average_groups()
        self.iteration += 1

    def finish(self) -> None:
        """End the last, shorter round, if there is one."""
        if self.iteration > 0 and self.last_global < self.iteration - 1:
            self._average_all()

    def _average_all(self) -> None:
        unit, common = unit_of(self.outer, [self.lrs]), []
        for block, (theta, before) in enumerate(zip(self.theta, self.finished[self.last_global], strict=True)):
            anchor, momentum = before[0], self.momentum[block]
            self.momentum[block], moved = displacement_of(self.outer, momentum, anchor - theta.mean(0), unit)
            common.append(np.repeat((anchor - moved)[None], self.replicas, axis=0))
        self.theta, self.lrs = common, []
        self.last_global = self.iteration
        self.finished[self.iteration] = self.theta
        self.count += 1

    def _average_groups(self) -> None:
        versions = [self.iteration - self.late.get((self.iteration, r), 0) for r in range(self.replicas)]
        assert min(versions) >= self.last_global, "a model from before the last global average is contributed"
        models = range(len(self.theta))
        after = [theta.copy() for theta in self.theta]
        for group in exchanges(self.iteration, self.size, self.replicas):
            for block in models:
                total = sum(self.finished[versions[member]][block][member] for member in group)
                for member in group:
                    if versions[member] == self.iteration:
                        after[block][member] = total / self.size
                    else:
                        after[block][member] = (total + self.theta[block][member]) / (self.size + 1)
        self.theta = after


def exchanges(iteration: int, size: int, replicas: int) -> list[list[int]]:
    """Return the groups of an iteration. In each of log2 S rounds, every replica meets the partner that differs in one bit."""
    rounds, bits = size.bit_length() - 1, replicas.bit_length() - 1
    met = [{replica} for replica in range(replicas)]
    for turn in range(rounds):
        distance = 1 << ((iteration * rounds + turn) % bits)
        met = [met[replica] | met[replica ^ distance] for replica in range(replicas)]
    return sorted(map(list, {tuple(sorted(group)) for group in met}))


@dataclass
class History:
    """Models of a run, and the number of averages over all replicas."""

    states: list[Blocks]
    """Models after every step."""
    final: Blocks
    """Models after `finish`."""
    count: int
    bytes_sent: float = 0.0

    def assert_close(self, other: History, tolerance: float = 1e-12) -> None:
        """Check that no element differs by more than `tolerance`; 0 means equality to the last bit."""
        both = zip([*self.states, self.final], [*other.states, other.final], strict=True)
        for step, (ours, theirs) in enumerate(both, start=1):
            for block, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=f"step {step}, block {block}")
        assert self.count == other.count


@dataclass(frozen=True)
class Case:
    """Run, and the replicas that are late in it."""

    scenario: Scenario
    late: Lateness | None = field(default_factory=dict)
    """Planned lateness. None plans nothing, and the replicas run freely."""
    second_rank: str = "with the first"
    """State of a replica's second rank when the version is chosen: "ahead" has posted a newer model than the first rank, "behind"
    has not even posted the chosen one."""
    sleeps: Mapping[int, float] = field(default_factory=dict)
    """Largest pause before the end of a step, in seconds, by replica."""
    held: Collection[tuple[int, int]] = ()
    """(iteration, replica) of steps that end only when the other replicas have carried out the iteration without this one."""
    fault: tuple[int, int] | None = None
    """(rank, step) that raises an error."""
    timeout_seconds: float = PATIENCE

    @property
    def warmup(self) -> int:
        return self.scenario.sync.warmup_steps

    @property
    def iterations(self) -> int:
        """Number of local steps, which count from 0."""
        return self.scenario.steps - self.warmup

    def behind(self, iteration: int, replica: int) -> int:
        return self.late.get((iteration, replica), 0)

    def version(self, iteration: int, replica: int) -> int:
        """Return the iteration whose model the replica contributes."""
        return iteration - self.behind(iteration, replica)

    def on_time(self, iteration: int) -> int:
        """Return the number of replicas that are on time."""
        count = sum((iteration, replica) not in self.late for replica in range(self.scenario.replicas))
        assert count, "at least one replica must be on time"
        return count

    def answered_before(self, iteration: int, replica: int) -> int:
        """Return the last iteration that uses an older model of the replica than that of `iteration`; -1 if there is none."""
        later = range(iteration, self.iterations)
        return max((i for i in later if self.version(i, replica) < iteration), default=-1)


def ends_of_rounds(scenario: Scenario) -> list[int]:
    """Return the iterations after which all replicas average, by the rule of the period's own paper."""
    period, warmup = scenario.sync.period, scenario.sync.warmup_steps
    local = scenario.steps - warmup
    if period.kind == "steps":
        return list(range(period.every - 1, local, period.every))
    ends, done = [], 0
    while done < local:
        done = min(local, done + max(period.base, int((period.alpha / scenario.rates.at(warmup + done + 1)) ** 2)))
        ends.append(done - 1)
    return ends


def replay(case: Case) -> tuple[History, WagmaOracle]:
    """Run the case by the oracle."""
    scenario, blocks = case.scenario, range(len(case.scenario.shapes))
    oracle = WagmaOracle(
        [scenario.start(block) for block in blocks],
        scenario.replicas,
        scenario.sync.schedule.group_size,
        case.late,
        ends_of_rounds(scenario),
        scenario.sync.outer,
    )
    states = []
    for step in range(1, scenario.steps + 1):
        noise, lr = [scenario.noise(step, block) for block in blocks], scenario.rates.at(step)

        def updates(theta: Blocks, noise: Blocks = noise, lr: float = lr) -> Blocks:
            return [lr * (n - scenario.pull * t) for n, t in zip(noise, theta, strict=True)]

        if step <= case.warmup:  # gradients are averaged, so all replicas have one model
            means = [np.broadcast_to(n.mean(0), n.shape) for n in noise]
            oracle.theta = [t + u for t, u in zip(oracle.theta, updates(oracle.theta, means), strict=True)]
            oracle.finished[-1] = oracle.theta
        else:
            oracle.step(updates, lr)
        states.append([theta.copy() for theta in oracle.theta])
    oracle.finish()
    return History(states, oracle.theta, oracle.count), oracle
