"""Tests of virtual clocks of replicas in one process, and of WAGMA's averages by these clocks."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from llmtrain.config import VirtualClockSection
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.in_process import InProcess
from llmtrain.parallel.mesh import Mesh
from llmtrain.parallel.virtual_clock import VirtualClock
from llmtrain.parallel.wire_format import WireFormat
from llmtrain.parallel.world import World
from llmtrain.sync.build_method import build_method
from llmtrain.sync.schedules.memory_averager import MemoryAverager, SharedAverages, sent_bytes, summed
from llmtrain.turns import Turns
from tests.distributed.fake_engine import FakeEngine, Scenario, load, save
from tests.distributed.oracle_wagma import Case, History, Lateness, ends_of_rounds, replay
from tests.distributed.pool import RankPool
from tests.distributed.wagma_runs import Answer, assert_groups_agree, history, wagma

SEED = 7


def in_process(section: VirtualClockSection, work: Callable[[Mesh], Any]) -> list:
    """Call `work` for each replica, all in this process with a virtual clock each, and return the results."""
    count = len(section.step_seconds)
    process = InProcess(count, 20.0, clocks=[VirtualClock(section, SEED, replica) for replica in range(count)])

    def of_replica(rank: int) -> Any:
        with process.open_mesh(World(rank, count, rank, count)) as mesh:
            return work(mesh)

    return process.turns.run(of_replica)


def times(section: VirtualClockSection, replica: int, steps: int) -> list[float]:
    clock, seen = VirtualClock(section, SEED, replica), []
    for step in range(1, steps + 1):
        clock.complete_step(step)
        seen.append(clock.now)
    return seen


def test_a_clock_counts_each_step_once_and_exactly() -> None:
    """Thirty steps of 0.1 s take at least 3 s. Otherwise a round of 3 s would have one more step."""
    clock = VirtualClock(VirtualClockSection(step_seconds=(0.1, 2.0)), SEED, 0)
    for step in range(1, 31):
        clock.complete_step(step)
        clock.complete_step(step)
    assert clock.now == pytest.approx(3.0, abs=1e-4) and clock.now >= 3.0
    assert clock.now == 30 * clock.seconds_of(0, 1)
    clock.wait_until(2.0)
    assert clock() == 30 * clock.seconds_of(0, 1)
    clock.wait_until(4.5)
    assert clock() == 4.5


def test_one_replica_is_late_in_every_step() -> None:
    section = VirtualClockSection(step_seconds=(1.0, 1.0, 1.0), random_delay=0.5)
    steps = np.diff([times(section, replica, 60) for replica in range(3)], prepend=0)
    assert set(steps.sum(0)) == {3.5}
    assert all((steps == 1.5).sum(1) >= 10), "some replica is hardly ever late"


def meet(mesh: Mesh) -> tuple[float, float]:
    own = (3.0, 5.0)[mesh.replica_comms.rank]
    mesh.clock.wait_until(own)
    mesh.replica_comms.with_own_traffic().all_reduce(torch.ones(2))
    mesh.all_ranks.all_reduce(torch.ones(2))
    before = mesh.virtual_seconds
    pending = mesh.replica_comms.start_all_reduce(torch.ones(2))
    mesh.clock.wait_until(own + 1.5)
    pending.wait()
    return before, mesh.virtual_seconds


def test_a_message_arrives_when_the_last_replica_has_sent_it() -> None:
    """The first replica trains on until 4.5, and then waits until 5. The second one's wait costs nothing. Messages that
    are not part of training take no time."""
    assert in_process(VirtualClockSection(step_seconds=(1.0, 1.0)), meet) == [(3.0, 5.0), (5.0, 6.5)]


def test_averages_are_in_pinned_memory_if_messages_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to pin memory, because real pinned memory needs a GPU."""
    message, pinned, empty_like = torch.ones(3), [], torch.empty_like

    def allocated(like: torch.Tensor, pin_memory: bool) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty_like(like)

    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda part: part is message)
    monkeypatch.setattr(torch, "empty_like", allocated)
    shared = SharedAverages(Turns(1, 1.0), lambda _: [[0]], lambda _: False, lambda *_: 1.0, None)
    averager = MemoryAverager(shared, 0)
    averager.start(0, -1, [torch.zeros(3)])
    averager.publish(0, [message])
    [average], version = averager.collect(0)
    assert (average.tolist(), version, pinned) == ([1.0] * 3, 0, [True])


def lateness(section: VirtualClockSection, scenario: Scenario) -> Lateness:
    """Return how old a message each replica contributes, from a simulation of events in the order of their time."""
    clock, replicas, warmup = VirtualClock(section, SEED, 0), scenario.replicas, scenario.sync.warmup_steps
    ends, local = set(ends_of_rounds(scenario)), scenario.steps - warmup
    newest, late, started = [-1] * replicas, {}, set()
    waiting: list[int] = []
    events = [(clock.seconds_of(r, warmup + 1), r, 0) for r in range(replicas)]
    heapq.heapify(events)
    while events:
        now, arrived = events[0][0], []
        while events and events[0][0] == now:
            arrived.append(heapq.heappop(events)[1:])
        for replica, iteration in arrived:
            newest[replica] = iteration
        for replica, iteration in arrived:
            if iteration in ends:
                waiting.append(replica)
                if len(waiting) < replicas:
                    continue
                goes_on, waiting = waiting, []
            else:
                goes_on = [replica]
                if iteration not in started:
                    started.add(iteration)
                    late |= {(iteration, r): iteration - newest[r] for r in range(replicas) if newest[r] < iteration}
            for one in goes_on if iteration + 1 < local else []:
                heapq.heappush(events, (now + clock.seconds_of(one, warmup + 2 + iteration), one, iteration + 1))
    return late


def run(case: Case, section: VirtualClockSection) -> tuple[History, list[Answer]]:
    """Run a case in one process, and return the history of all replicas and each replica's answer."""
    scenario = case.scenario
    parts = [scenario.steps] if scenario.resume_after is None else [scenario.resume_after, scenario.steps]

    def of_replica(mesh: Mesh) -> Answer:
        answer, saved, done = Answer(), None, 0
        comms = mesh.replica_comms, mesh.shard_comms
        for end in parts:
            engine = FakeEngine(scenario, mesh.replica_comms.rank, 0, torch.device("cpu"))
            method = build_method(scenario.sync, engine, *comms, scenario.rates, seed=0, clock=mesh.clock)
            if saved is not None:
                load(engine, method, saved)
            for step in range(done + 1, end + 1):
                plan = method.begin_step(step, scenario.rates.at(step))
                engine.forward()
                mesh.clock.complete_step(step)
                engine.step(step, plan.lr)
                method.end_step(step)
                answer.states.append(list(engine.computed))
                answer.behind.append(method.schedule.staleness)
            done, saved = end, save(engine, method)
        method.finish()
        answer.final, answer.bytes_sent = list(engine.computed), mesh.replica_comms.traffic.bytes
        answer.late, answer.count = method.stats.late, method.stats.count
        assert len(method.schedule.averager.shared.posted[0]) <= 1 + scenario.sync.period.every, "old messages are kept"
        assert not method.schedule.averager.shared.sums
        return answer

    answers = in_process(section, of_replica)
    return history(case, answers), answers


def case_of(section: VirtualClockSection, steps: int = 22, **changes: Any) -> Case:
    scenario = Scenario(wagma(**changes), len(section.step_seconds), 1, steps=steps)
    return Case(scenario, lateness(section, scenario))


CLOCKS = {
    "even": VirtualClockSection(step_seconds=(1.0,) * 4),
    "half": VirtualClockSection(step_seconds=(1.0, 1.0, 1.0, 2.0)),
    "all differ": VirtualClockSection(step_seconds=(1.0, 2.5, 0.75, 4.0)),
    "random": VirtualClockSection(step_seconds=(1.0,) * 4, random_delay=1.0),
    "both": VirtualClockSection(step_seconds=(1.0, 1.0, 1.5, 1.0), random_delay=2.25),
    "two": VirtualClockSection(step_seconds=(1.0, 3.0)),
}
CASES = [(clock, {}) for clock in CLOCKS]
CASES += [("all differ", {"size": 4}), ("both", {"every": 8, "warmup_steps": 3}), ("half", {"every": 1})]
CASES += [("both", {"outer": {"kind": "nesterov", "lr": 0.7, "momentum": 0.9}})]


@pytest.mark.parametrize(("name", "changes"), CASES, ids=[f"{name} {' '.join(keys)}".strip() for name, keys in CASES])
def test_wagma_by_the_clock_is_the_oracles(name: str, changes: dict) -> None:
    case = case_of(CLOCKS[name], **changes)
    got, answers = run(case, CLOCKS[name])
    got.assert_close(replay(case)[0])
    assert_groups_agree(case, got)
    for replica, answer in enumerate(answers):
        expected = [case.behind(iteration, replica) for iteration in range(case.iterations)]
        assert answer.late == np.count_nonzero(expected)
    assert bool(case.late) == (name != "even" and changes.get("every") != 1)


@pytest.mark.parametrize("resume_after", [5, 10])
def test_a_run_that_is_continued_at_a_rounds_end_is_the_run_left_alone(resume_after: int) -> None:
    case = case_of(CLOCKS["both"])
    continued = replace(case, scenario=replace(case.scenario, resume_after=resume_after))
    run(continued, CLOCKS["both"])[0].assert_close(run(case, CLOCKS["both"])[0], tolerance=0)


def test_within_a_round_all_replicas_continue_at_the_same_time() -> None:
    """The checkpoint has only their newest messages, so a late replica contributes a newer one than otherwise."""
    case = case_of(CLOCKS["half"], steps=12)
    behind = case.late[3, 3]
    assert behind == 2
    case = replace(
        case, scenario=replace(case.scenario, resume_after=3), late={**case.late, (3, 3): 1}
    )  # iterations 0 to 2 are done
    run(case, CLOCKS["half"])[0].assert_close(replay(case)[0])


def reduce_as_processes(wire: str | None) -> tuple[torch.Tensor, float]:
    comms = Comms(dist.group.WORLD)
    part = torch.randn(1000, generator=torch.Generator().manual_seed(dist.get_rank()))
    total = comms.all_reduce(part, wire=WireFormat(wire) if wire else None)
    return total, comms.traffic.bytes


@pytest.mark.parametrize("wire", [None, "bf16", "int8", "int4"])
def test_sums_and_bytes_are_those_of_processes(ranks: RankPool, wire: str | None) -> None:
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    made = WireFormat(wire) if wire else None
    for total, sent in ranks.run(reduce_as_processes, wire, world_size=2):
        assert torch.equal(summed(parts, made), total)
        assert sent_bytes(parts[0], 2, made) == sent
