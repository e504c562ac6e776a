"""Runs of WAGMA on threads with planned lateness or on gloo with real lateness, and checks against the oracle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from llmtrain.config import SyncSection
from llmtrain.parallel.collectives import PendingCollective
from llmtrain.parallel.comms import Comms
from llmtrain.sync.build_method import build_method
from llmtrain.sync.method import Method
from llmtrain.sync.schedules.group_averager import GroupAverager, Payloads, WakeSignal
from tests.distributed.fake_engine import FakeEngine, Shards, assemble, choices, load, save
from tests.distributed.oracle_wagma import PATIENCE, Case, History, Lateness, ends_of_rounds, exchanges, replay
from tests.distributed.threads import FreeThreads


def wagma(every: int | None = 5, size: int | str = 2, **changes: Any) -> SyncSection:
    return choices("wagma", every, schedule={"kind": "wait_avoiding", "group_size": size}, **changes)


class Fault(Exception):
    """Error that a test raises on a rank."""


@dataclass
class Answer:
    """Record of a run on one rank."""

    states: list[Shards] = field(default_factory=list)
    """Parameters after every step."""
    final: Shards = field(default_factory=list)
    behind: list[int] = field(default_factory=list)
    """Age in iterations of the replica's message in the last group average, after every step."""
    contributed: dict[int, int] = field(default_factory=dict)
    """Iteration -> iteration of the message that the rank's thread contributed, found by comparing messages."""
    late: int = 0
    count: int = 0
    bytes_sent: float = 0.0
    forgotten: list[int] = field(default_factory=list)


Waking = Callable[[dist.Store], WakeSignal]


class Planned:
    """Stand-in for WakeSignal, by a plan. An iteration starts when all replicas that are on time have arrived at it,
    and the late ones have finished the models that they contribute.

    For example, replica 1 is late in iteration 2, and contributes its model of iteration 1:

        replica 0    step 2, announce(2)              continues when the sum of 2 exists
        replica 1    step 2, hold(2) ............... end of step 2, which merges that sum
        threads      wait(2) returns when all replicas on time have arrived, then they sum

    `Case.second_rank` says what the second rank of a replica has posted by then.
    """

    def __init__(self, case: Case, replica: int, rank: int, threads: FreeThreads, store: dist.Store):
        self.case, self.replica, self.rank, self.threads, self.store = case, replica, rank, threads, store
        self.worker: GroupAverager | None = None
        self.started = -1
        self.forgotten: list[int] = []

    def announce(self, iteration: int) -> None:
        assert (iteration, self.replica) not in self.case.late, "a late replica announced an iteration that is over"
        self.store.add(f"arrived {iteration}", 1)

    def wait(self, iteration: int) -> bool:
        def may_go_on() -> bool:
            return self.worker._closing or self.store.check([f"end {iteration}"]) or self._is_due(iteration)

        self._until(may_go_on, f"iteration {iteration} starts")
        if self.worker._closing or self.store.check([f"end {iteration}"]):
            return False
        self.started = iteration
        return True

    def end(self, iteration: int) -> None:
        self.store.set(f"end {iteration}", b"")

    def forget(self, iterations: Iterable[int]) -> None:
        self.forgotten += iterations

    def _is_due(self, iteration: int) -> bool:
        is_ahead = self.rank == 1 and self.case.second_rank == "ahead"
        needed = iteration if is_ahead else self.case.version(iteration, self.replica)
        if self.rank == 1 and self.case.second_rank == "behind":
            needed = -1
        arrived = self.store.add(f"arrived {iteration}", 0)
        return arrived == self.case.on_time(iteration) and self.worker.latest()[0] >= needed

    def hold(self, iteration: int) -> None:
        """Hold a late replica before the end of a step until the iterations that miss its model are over."""
        if self.rank == 1 and self.case.second_rank == "ahead":
            return
        last = self.case.answered_before(iteration, self.replica)
        if last >= 0:
            self._until(lambda: self.worker._done >= last, f"iteration {last} is over without replica {self.replica}")
        elif self.rank == 1 and self.case.second_rank == "behind" and not self.worker.is_global(iteration):
            self._until(
                lambda: self.started >= iteration or not self.worker.is_running, f"iteration {iteration} starts"
            )

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        until(lambda: self.threads.stopped or condition(), what)
        if self.threads.stopped:
            raise RuntimeError(self.threads.stopped)


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.0005)


class Watched:
    """Comms of a group that passes copies of its messages to `tell`."""

    def __init__(self, comms: Comms, tell: Callable[[torch.Tensor], None]):
        self._comms, self._tell = comms, tell

    def start_all_reduce(self, tensor: torch.Tensor, *args: Any) -> PendingCollective:
        self._tell(tensor.clone())
        return self._comms.start_all_reduce(tensor, *args)


def watch(worker: GroupAverager, contributed: dict[int, int]) -> None:
    """Record which message `worker` contributes to each iteration: the newest posted one with the same bits."""
    posted: dict[int, Payloads] = {}
    sent: dict[int, Payloads] = {}
    start, post, carry_out, group_of = worker.start, worker.publish, worker._run_iteration, worker.group_of

    def watched_start(iteration: int, newest: int, message: Payloads) -> None:
        posted[newest] = [part.clone() for part in message]
        start(iteration, newest, message)

    def watched_post(iteration: int, message: Payloads) -> None:
        posted[iteration] = [part.clone() for part in message]
        post(iteration, message)

    def watched_group_of(iteration: int) -> Watched:
        return Watched(group_of(iteration), sent.setdefault(iteration, []).append)

    def watched_carry_out(iteration: int) -> None:
        carry_out(iteration)
        if iteration in sent:
            same = [i for i, message in list(posted.items()) if all(map(torch.equal, message, sent[iteration]))]
            contributed[iteration] = max(same)

    worker.start, worker.publish, worker.group_of, worker._run_iteration = (
        watched_start,
        watched_post,
        watched_group_of,
        watched_carry_out,
    )


def train(case: Case, replica: Comms, shard: Comms, store: dist.Store | None, waking: Waking = WakeSignal) -> Answer:
    """Run a case on one rank, with a resume if the case has one, and return the rank's answer."""
    total, cut = case.scenario.steps, case.scenario.resume_after
    answer = Answer()
    with _built(case, replica, shard, store, waking, answer) as (engine, method):
        _advance(case, engine, method, range(1, (cut or total) + 1), answer)
        if cut is None:
            _finish(engine, method, answer)
        else:
            saved = save(engine, method)
    if cut is not None:
        _meet(case, store)
        with _built(case, replica, shard, store, waking, answer) as (engine, method):
            load(engine, method, saved)
            _advance(case, engine, method, range(cut + 1, total + 1), answer)
            _finish(engine, method, answer)
    answer.bytes_sent = replica.traffic.bytes
    return answer


def _meet(case: Case, store: dist.Store | None) -> None:
    """Wait until all ranks have closed their methods. Without this, a rank that is already resumed can start an
    iteration that the old thread of another rank still waits for."""
    if store is not None:
        store.add("closed", 1)
        until(lambda: store.add("closed", 0) == case.scenario.replicas * case.scenario.shard, "all ranks have closed")


@contextmanager
def _built(
    case: Case, replica: Comms, shard: Comms, store: dist.Store | None, waking: Waking, answer: Answer
) -> Iterator[tuple[FakeEngine, Method]]:
    scenario = case.scenario
    engine = FakeEngine(scenario, replica.rank, shard.rank, replica.device)
    run = {"seed": 0, "store": store, "timeout_seconds": case.timeout_seconds}
    method = build_method(scenario.sync, engine, replica, shard, scenario.rates, **run)
    worker = method.schedule.averager
    if worker is not None:
        worker.wake_signal = waking(store)
        worker.wake_signal.worker = worker
        watch(worker, answer.contributed)
    try:
        yield engine, method
    finally:
        method.close()


def _advance(case: Case, engine: FakeEngine, method: Method, steps: range, answer: Answer) -> None:
    draw = np.random.default_rng((case.scenario.seed, engine.replica))
    worker, replica = method.schedule.averager, engine.replica
    for step in steps:
        plan, iteration = method.begin_step(step, case.scenario.rates.at(step)), step - case.warmup - 1
        engine.forward()
        engine.step(step, plan.lr)
        if case.fault == (replica * case.scenario.shard + engine.rank, step):
            raise Fault
        if case.late is not None and iteration >= 0:
            worker.wake_signal.hold(iteration)
        if (iteration, replica) in case.held:
            until(lambda i=iteration: worker._done >= i, f"iteration {iteration} is over without replica {replica}")
        time.sleep(draw.uniform(0, case.sleeps.get(replica, 0.0)))
        method.end_step(step)
        answer.states.append(list(engine.computed))
        answer.behind.append(method.schedule.staleness)


def _finish(engine: FakeEngine, method: Method, answer: Answer) -> None:
    method.finish()
    stats = method.stats
    answer.final = list(engine.computed)
    answer.late, answer.count = stats.late, stats.count
    if method.schedule.averager is not None:
        answer.forgotten = getattr(method.schedule.averager.wake_signal, "forgotten", [])


def run(case: Case) -> tuple[History, list[Answer]]:
    """Run a case on threads with planned lateness, and return the history of all replicas and each rank's answer."""
    scenario, before = case.scenario, set(threading.enumerate())
    threads, store = FreeThreads(scenario.replicas * scenario.shard), dist.HashStore()

    def train_rank(rank: int) -> Answer:
        replica, shard = threads.axes(rank, scenario.replicas, scenario.shard)
        return train(case, replica, shard, store, partial(Planned, case, replica.rank, shard.rank, threads))

    answers = threads.run(train_rank)
    if scenario.resume_after is not None:  # close() does not wait for its thread
        until(lambda: set(threading.enumerate()) <= before, "the threads of closed methods have ended")
    assert set(threading.enumerate()) <= before, "a thread outlived finish()"
    return history(case, answers), answers


def history(case: Case, answers: list[Answer]) -> History:
    """Assemble the history of all replicas from the answers of all ranks."""
    scenario = case.scenario
    assert len({answer.count for answer in answers}) == 1
    states = [assemble(scenario, shards) for shards in zip(*(answer.states for answer in answers), strict=True)]
    final = assemble(scenario, [answer.final for answer in answers])
    return History(states, final, answers[0].count, sum(answer.bytes_sent for answer in answers))


def check(case: Case) -> tuple[History, list[Answer]]:
    """Run a case on threads, check that the run is the oracle's, and return what `run` does."""
    got, answers = run(case)
    is_the_oracles(case, got, answers)
    return got, answers


def is_the_oracles(case: Case, got: History, answers: list[Answer]) -> None:
    """Check every replica's model after every step, and the lateness that every rank has counted. Without a plan, the
    oracle follows the messages that the replicas' first ranks have contributed."""
    if case.late is None:
        case = replace(case, late=_lateness(case, answers))
    got.assert_close(replay(case)[0])
    assert all((block == block[0]).all() for block in got.final), "finish() left replicas that differ"
    assert_groups_agree(case, got)
    groups = [i for i in range(case.iterations) if i not in ends_of_rounds(case.scenario)]
    for rank, answer in enumerate(answers):
        expected = [case.behind(iteration, rank // case.scenario.shard) for iteration in range(case.iterations)]
        assert answer.late == np.count_nonzero(expected)
        assert [answer.behind[case.warmup + i] for i in groups] == [expected[i] for i in groups]
        assert answer.contributed == {i: i - expected[i] for i in groups}


def _lateness(case: Case, answers: list[Answer]) -> Lateness:
    first = answers[:: case.scenario.shard]
    return {(i, r): i - newest for r, one in enumerate(first) for i, newest in one.contributed.items() if newest < i}


def assert_groups_agree(case: Case, got: History) -> None:
    """Check that replicas have equal bits: all of them after a round, otherwise those of a group on time."""
    replicas, ends = case.scenario.replicas, ends_of_rounds(case.scenario)
    for iteration, state in enumerate(got.states[case.warmup :]):
        groups = exchanges(iteration, case.scenario.sync.schedule.group_size, replicas)
        for group in [list(range(replicas))] if iteration in ends else groups:
            equal = [member for member in group if not case.behind(iteration, member)]
            for block in state:
                assert (block[equal] == block[equal[:1]]).all(), f"iteration {iteration}: {equal} differ"
