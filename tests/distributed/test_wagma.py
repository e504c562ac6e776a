"""WAGMA on gloo ranks against its oracle: with lateness that is planned, without any clock, and with the real thing."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from llmtrain.config import ScheduleSection, SyncSection
from llmtrain.errors import TrainingError
from llmtrain.parallel.comms import Comms
from llmtrain.sync import build
from llmtrain.sync.method import Method
from tests.distributed.fake_engine import SHAPES, FakeEngine, Scenario, Shards, choices, meeting_store, simulate
from tests.distributed.oracle_wagma import Case, History, Lateness, Planned, ends_of_rounds, exchanges, replay
from tests.distributed.pool import RankPool

MESHES = [pytest.param(2, 2, id="2x2"), pytest.param(4, 1, id="4x1")]


def wagma(every: int | None = 5, size: int | str = 2, **changes: Any) -> SyncSection:
    return choices("wagma", every, group={"kind": "butterfly", "size": size}, **changes)


class Fault(Exception):
    """What a rank of a test raises."""


@dataclass
class Answer:
    """What one rank saw."""

    states: list[Shards] = field(default_factory=list)
    """After every step."""
    final: Shards = field(default_factory=list)
    behind: list[int] = field(default_factory=list)
    """After every step: how many iterations old its message in the last group average was."""
    late: int = 0
    count: int = 0
    bytes_sent: float = 0.0
    threads_left: list[str] = field(default_factory=list)
    keys_left: int = 0
    forgotten: list[int] = field(default_factory=list)


def _train(case: Case) -> Answer:
    """One rank's run."""
    scenario = case.scenario
    axes = init_device_mesh("cpu", (scenario.replicas, scenario.shard), mesh_dim_names=("replica", "shard"))
    replica, shard = Comms(axes.get_group("replica")), Comms(axes.get_group("shard"))
    store = meeting_store()
    keys, threads = store.num_keys(), set(threading.enumerate())
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if case.late is not None:
            patch.setattr(build, "Activation", lambda store: Planned(case, replica.rank, shard.rank, store))
        answer = _steps(case, replica, shard, store)
    dist.barrier()  # the first rank is where the store is
    answer.threads_left = [thread.name for thread in set(threading.enumerate()) - threads]
    answer.keys_left = store.num_keys() - keys
    dist.barrier()
    return answer


@contextmanager
def _built(case: Case, replica: Comms, shard: Comms, store: dist.Store | None) -> Iterator[tuple[FakeEngine, Method]]:
    scenario = case.scenario
    engine = FakeEngine(scenario, replica.rank, shard.rank, replica.device)
    method = build.build_method(
        scenario.sync, engine, replica, shard, scenario.rates, seed=0, store=store, timeout_seconds=case.timeout_seconds
    )
    if case.late is not None:
        method.schedule.worker.activation.worker = method.schedule.worker
    try:
        yield engine, method
    finally:
        method.close()


def _steps(case: Case, replica: Comms, shard: Comms, store: dist.Store | None) -> Answer:
    total, cut = case.scenario.steps, case.scenario.resume_after
    answer = Answer()
    if cut is None:
        with _built(case, replica, shard, store) as (engine, method):
            _advance(case, engine, method, range(1, total + 1), answer)
            _finish(engine, method, answer)
    else:
        with _built(case, replica, shard, store) as (engine, method):
            _advance(case, engine, method, range(1, cut + 1), answer)
            tensors = {**method.shared_tensors(), **method.own_tensors()}
            saved = pickle.dumps((engine.blocks, method.state_dict(), tensors))
        with _built(case, replica, shard, store) as (engine, method):
            blocks, state, tensors = pickle.loads(saved)
            for block, values in zip(engine.blocks, blocks, strict=True):
                for tensor, value in zip(block.shards, values.shards, strict=True):
                    tensor.copy_(value)
                engine.publish(block)
            method.load_state_dict(state, tensors)
            _advance(case, engine, method, range(cut + 1, total + 1), answer)
            _finish(engine, method, answer)
    answer.bytes_sent = replica.traffic.bytes
    return answer


def _advance(case: Case, engine: FakeEngine, method: Method, steps: range, answer: Answer) -> None:
    draw = np.random.default_rng((case.scenario.seed, engine.replica))
    for step in steps:
        plan = method.begin_step(step, case.scenario.rates.at(step))
        engine.forward()
        engine.step(step, plan.lr)
        if case.fault is not None and case.fault == (dist.get_rank(), step):
            raise Fault
        if case.late is not None and step > case.warmup:
            method.schedule.worker.activation.hold(step - case.warmup - 1)
        time.sleep(draw.uniform(0, case.sleeps.get(engine.replica, 0.0)))
        method.end_step(step)
        answer.states.append([engine.computed[block.name] for block in engine.blocks])
        answer.behind.append(method.schedule.staleness)


def _finish(engine: FakeEngine, method: Method, answer: Answer) -> None:
    method.finish()
    report = method.report()
    answer.final = [engine.computed[block.name] for block in engine.blocks]
    answer.late, answer.count = report.late, report.count
    if method.schedule.worker is not None:
        answer.forgotten = getattr(method.schedule.worker.activation, "forgotten", [])


def run(ranks: RankPool, case: Case) -> tuple[History, list[Answer]]:
    """All ranks' run; what they held, and what each saw."""
    scenario = case.scenario
    answers = ranks.run(_train, case, world_size=scenario.replicas * scenario.shard, timeout=40)
    assert len({answer.count for answer in answers}) == 1
    states = [_whole(scenario, shards) for shards in zip(*(answer.states for answer in answers), strict=True)]
    final = _whole(scenario, [answer.final for answer in answers])
    sent = sum(answer.bytes_sent for answer in answers)
    return History(states, final, answers[0].count, sent), answers


def _whole(scenario: Scenario, by_rank: list[Shards]) -> list[np.ndarray]:
    """Blocks as [replicas, elements]."""
    blocks = []
    for index, shapes in enumerate(scenario.shapes):
        replicas = []
        for first in range(0, len(by_rank), scenario.shard):
            parts = [by_rank[first + rank][index] for rank in range(scenario.shard)]
            tensors = [np.concatenate([part[tensor] for part in parts]) for tensor in range(len(shapes))]
            replicas.append(np.concatenate([tensor.reshape(-1) for tensor in tensors]))
        blocks.append(np.stack(replicas))
    return blocks


def check(ranks: RankPool, case: Case) -> tuple[History, list[Answer]]:
    """Every replica's model after every step, and who counted itself late. Without a plan, whoever was late is what the
    oracle goes by."""
    got, answers = run(ranks, case)
    if case.late is None:
        case = replace(case, late=_lateness(case, answers))
    got.assert_close(replay(case)[0])
    assert all((block == block[0]).all() for block in got.final), "finish() left replicas that differ"
    assert_groups_agree(case, got)
    for rank, answer in enumerate(answers):
        expected = [case.behind(iteration, rank // case.scenario.shard) for iteration in range(case.iterations)]
        assert answer.late == np.count_nonzero(expected)
        groups = [i for i in range(case.iterations) if i not in ends_of_rounds(case.scenario)]
        assert [answer.behind[case.warmup + i] for i in groups] == [expected[i] for i in groups]
        assert answer.threads_left == [], "a thread outlived finish()"
    return got, answers


def _lateness(case: Case, answers: list[Answer]) -> Lateness:
    """Who was late by how much, from what the replicas' first ranks say; `check` holds the others to it."""
    first = answers[:: case.scenario.shard]
    groups = [i for i in range(case.iterations) if i not in ends_of_rounds(case.scenario)]
    by_step = {(i, replica): answer.behind[case.warmup + i] for replica, answer in enumerate(first) for i in groups}
    return {at: behind for at, behind in by_step.items() if behind}


def assert_groups_agree(case: Case, got: History) -> None:
    """To the last bit: all replicas after a round, and within a group those that were on time."""
    replicas, ends = case.scenario.replicas, ends_of_rounds(case.scenario)
    for iteration, state in enumerate(got.states[case.warmup :]):
        groups = exchanges(iteration, case.scenario.sync.group.size, replicas)
        for group in [list(range(replicas))] if iteration in ends else groups:
            equal = [member for member in group if not case.behind(iteration, member)]
            for block in state:
                assert (block[equal] == block[equal[:1]]).all(), f"iteration {iteration}: {equal} differ"


PLANS = {
    "nobody": {},
    "before-and-after-a-global-average": {(2, 1): 1, (3, 2): 1, (5, 1): 1, (8, 1): 1, (10, 1): 1, (10, 2): 1},
    "again-and-again": {(1, 1): 1, (2, 1): 1, (3, 1): 1, (6, 1): 1, (7, 1): 1},
    "iterations-behind": {(1, 1): 1, (2, 1): 2, (3, 1): 3, (5, 1): 1, (6, 1): 2, (7, 1): 1, (10, 1): 1, (11, 1): 2},
    "several-at-once": {(2, 1): 1, (2, 2): 1, (2, 3): 1, (7, 0): 1, (7, 2): 1, (11, 1): 1, (11, 3): 1},
    "a-whole-group": {(2, 2): 1, (2, 3): 1, (6, 0): 1, (6, 1): 1, (7, 1): 2, (7, 3): 1},
}
"""With rounds of 5: iterations 4 and 9 are global, and 10 and 11 a last, shorter round."""


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_every_step(ranks: RankPool, plan: dict, replicas: int, shard: int) -> None:
    if replicas == 2:  # one of them has to be on time
        plan = {(i, replica): behind for (i, replica), behind in plan.items() if replica == 1}
    check(ranks, Case(Scenario(wagma(), replicas, shard, steps=12), plan))


@pytest.mark.parametrize(("size", "seed"), [(2, 0), (2, 1), (4, 2)])
def test_any_plan(ranks: RankPool, size: int, seed: int) -> None:
    """Random lateness; replica `seed` is always on time."""
    draw, late, versions = np.random.default_rng(seed), {}, [-1] * 4
    for iteration in range(22):
        for replica in range(4):
            if iteration % 8 == 7 or replica == seed or iteration == 0 or draw.random() < 0.25:
                versions[replica] = iteration
            else:
                versions[replica] = int(draw.choice([versions[replica], iteration - 1], p=[0.7, 0.3]))
                late[iteration, replica] = iteration - versions[replica]
    assert max(late.values()) > 3
    check(ranks, Case(Scenario(wagma(8, size), 4, 1, steps=22, seed=seed), late))


@pytest.mark.parametrize("behind", [1, 2])
def test_late_in_the_very_first_step(ranks: RankPool, behind: int) -> None:
    """Nobody waits there either: the common model that replicas start from stands in."""
    late = {(iteration, 1): iteration + 1 for iteration in range(behind)}
    check(ranks, Case(Scenario(wagma(), 4, 1, steps=7), late))


@pytest.mark.parametrize("plan", ["again-and-again", "iterations-behind"])
@pytest.mark.parametrize("second_rank", ["ahead", "behind"])
def test_both_ranks_of_a_replica_contribute_the_same_version(ranks: RankPool, plan: str, second_rank: str) -> None:
    """What the first one has finished decides, also where the second has finished more, or not yet as much."""
    check(ranks, Case(Scenario(wagma(), 2, 2, steps=12), PLANS[plan], second_rank))


@pytest.mark.parametrize(("steps", "warmup"), [(4, 0), (5, 0), (6, 0), (3, 3), (7, 3), (8, 3)])
def test_finish(ranks: RankPool, steps: int, warmup: int) -> None:
    """Wherever in a round the run ends."""
    check(
        ranks, Case(Scenario(wagma(warmup_steps=warmup), 4, 1, steps=steps), {(1, 1): 1} if steps - warmup > 1 else {})
    )


@pytest.mark.parametrize("every", [1, 2])
def test_short_rounds(ranks: RankPool, every: int) -> None:
    """With rounds of one step there is nothing for the thread to do."""
    check(ranks, Case(Scenario(wagma(every), 4, 1, steps=5)))


def test_rounds_that_grow(ranks: RankPool) -> None:
    """QSR's: some of one step, and the last one cut by the run's end."""
    sync = wagma(None, period={"kind": "qsr", "base": 1, "alpha": 1.0})
    falling = ScheduleSection(kind="linear", final_ratio=0.1)
    case = Case(Scenario(sync, 4, 1, steps=20, schedule=falling), {(13, 2): 1, (14, 2): 2, (17, 0): 1})
    ends = ends_of_rounds(case.scenario)
    assert ends[:2] == [0, 1]
    assert ends[-1] == 19
    assert not {13, 14, 17} & set(ends)
    check(ranks, case)


@pytest.mark.parametrize(
    ("replicas", "shard", "resume_after"), [(4, 1, 1), (4, 1, 5), (4, 1, 8), (2, 2, 3), (2, 2, 12)]
)
def test_a_resumed_run_is_the_run_left_alone(ranks: RankPool, resume_after: int, replicas: int, shard: int) -> None:
    """To the last bit, also right after a step that was late (3, 8) or ended a round (5); nothing waits for the start."""
    alone = Case(Scenario(wagma(), replicas, shard, steps=12), {(1, 1): 1, (2, 1): 1, (5, 1): 1, (7, 1): 1, (8, 1): 1})
    resumed = replace(alone, scenario=replace(alone.scenario, resume_after=resume_after))
    check(ranks, resumed)[0].assert_close(check(ranks, alone)[0], tolerance=0)


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
def test_a_group_of_all_that_are_on_time_is_averaging_every_step(ranks: RankPool, replicas: int, shard: int) -> None:
    groups = Case(Scenario(wagma(size=replicas), replicas, shard, steps=12))
    got = check(ranks, groups)[0]
    expected = simulate(ranks, Scenario(choices("local_sgd", every=1), replicas, shard, steps=12))
    after_steps = History([*expected.forwards[1:], expected.final], expected.final, got.count)
    got.assert_close(after_steps)


def test_one_replica_is_training_alone() -> None:
    scenario = Scenario(wagma(), 1, 1, steps=12)
    answer = _steps(Case(scenario, late=None), Comms(None), Comms(None), None)
    for index in range(len(SHAPES)):
        expected = scenario.start(index)
        for step in range(1, 13):
            expected = expected + scenario.noise(step, index)[0] - scenario.pull * expected
            got = _whole(scenario, [answer.states[step - 1]])[index][0]
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(_whole(scenario, [answer.final])[index][0], expected, rtol=0, atol=1e-12)
    assert (answer.late, answer.bytes_sent) == (0, 0)


@pytest.mark.parametrize(
    ("kind", "unit", "replicas", "shard"), [("bf16", 2**-9, 4, 1), ("int8", 1 / 254, 4, 1), ("int8", 1 / 254, 2, 2)]
)
def test_rounded_on_the_wire(ranks: RankPool, kind: str, unit: float, replicas: int, shard: int) -> None:
    """Groups agree to the last bit; and each average adds at most two roundings, of what is sent and of the sum."""
    late = {(2, 1): 1, (6, 1): 1, (7, 1): 2}
    case = Case(Scenario(wagma(wire=kind), replicas, shard, steps=12), late)
    got, _ = run(ranks, case)
    assert_groups_agree(case, got)
    assert all((block == block[0]).all() for block in got.final)
    expected, oracle = replay(case)
    for step, (ours, theirs) in enumerate(zip(got.states, expected.states, strict=True), start=1):
        error = max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True))
        assert 0 < error < 1.1 * step * 2 * unit * oracle.farthest


@pytest.mark.parametrize(("replicas", "shard", "size"), [(4, 1, 2), (4, 1, 4), (2, 2, 2)])
def test_bytes_are_those_of_the_rings(ranks: RankPool, replicas: int, shard: int, size: int) -> None:
    """Two rounds of five and two steps more: 10 averages in groups, 3 of all; a late replica sends as much."""
    scenario = Scenario(wagma(size=size), replicas, shard, steps=12)
    values = sum(scenario.size(block) for block in range(len(SHAPES)))
    rings = 10 * 2 * (size - 1) / size + 3 * 2 * (replicas - 1) / replicas
    got, _ = run(ranks, Case(scenario, {(2, 1): 1, (6, 1): 1}))
    assert got.bytes_sent == pytest.approx(rings * replicas * values * 8)


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
def test_what_is_over_is_forgotten(ranks: RankPool, replicas: int, shard: int) -> None:
    """By the first rank at each global average; so the store does not grow with the run."""
    case = Case(Scenario(wagma(), replicas, shard, steps=23))
    first, *others = check(ranks, case)[1]
    assert first.forgotten == [i for i in range(19) if i % 5 != 4]
    assert all(other.forgotten == [] for other in others)
    free = run(ranks, replace(case, late=None))[1]
    assert {answer.keys_left for answer in free} == {4}, "three iterations since, and the end"


@pytest.mark.parametrize(("replicas", "shard", "size"), [(4, 1, 2), (4, 1, 4), (2, 2, 2)])
def test_running_freely(ranks: RankPool, replicas: int, shard: int, size: int) -> None:
    """The real activation. Whoever happens to be late, and by how much: the run is the oracle's for just that."""
    scenario = Scenario(wagma(6, size), replicas, shard, steps=40)
    answers = check(ranks, Case(scenario, None, sleeps={replica: 0.004 for replica in range(replicas)}))[1]
    assert sum(answer.late for answer in answers) > 0, "the case would not test what it is for"


def test_a_straggler_is_late(ranks: RankPool) -> None:
    answers = check(ranks, Case(Scenario(wagma(), 4, 1, steps=20), None, sleeps={1: 0.03}))[1]
    assert answers[1].late > 0


@pytest.mark.parametrize(("replicas", "shard", "failing"), [(4, 1, 0), (4, 1, 3), (2, 2, 3)])
def test_a_rank_that_raises_takes_the_others_down(ranks: RankPool, failing: int, replicas: int, shard: int) -> None:
    """They fail, saying so, in less than the timeouts add up to; none of them hangs, and none ends as if all were well."""
    case = Case(Scenario(wagma(), replicas, shard, steps=40), None, fault=(failing, 8), timeout_seconds=2.0)
    told = ranks.run(_until_it_fails, case, timeout=8)
    assert [rank for rank, message in enumerate(told) if message == "raised"] == [failing]
    others = told[:failing] + told[failing + 1 :]
    assert all("peer died" in message or "remote server" in message for message in others), others


def _until_it_fails(case: Case) -> str:
    """What a rank ends with."""
    try:
        _train(case)
    except Fault:
        return "raised"
    except TrainingError as error:
        return str(error)
    return "ended"
