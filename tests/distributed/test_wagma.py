"""Tests of WAGMA against its oracle, with planned lateness. In test_wagma_freely.py, replicas are really late."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llmtrain.config import LRScheduleSection
from llmtrain.parallel.comms import Comms
from tests.distributed.fake_engine import SHAPES, Scenario, assemble, choices
from tests.distributed.oracle_wagma import Case, History, ends_of_rounds, replay
from tests.distributed.threads import simulate
from tests.distributed.wagma_runs import assert_groups_agree, check, run, train, wagma

MESHES = [pytest.param(2, 2, id="2x2"), pytest.param(4, 1, id="4x1")]


PLANS = {
    "nobody": {},
    "before-and-after-a-global-average": {(2, 1): 1, (3, 2): 1, (5, 1): 1, (8, 1): 1, (10, 1): 1, (10, 2): 1},
    "again-and-again": {(1, 1): 1, (2, 1): 1, (3, 1): 1, (6, 1): 1, (7, 1): 1},
    "iterations-behind": {(1, 1): 1, (2, 1): 2, (3, 1): 3, (5, 1): 1, (6, 1): 2, (7, 1): 1, (10, 1): 1, (11, 1): 2},
    "several-at-once": {(2, 1): 1, (2, 2): 1, (2, 3): 1, (7, 0): 1, (7, 2): 1, (11, 1): 1, (11, 3): 1},
    "a-whole-group": {(2, 2): 1, (2, 3): 1, (6, 0): 1, (6, 1): 1, (7, 1): 2, (7, 3): 1},
}
"""Lateness of replicas in rounds of 5: iterations 4 and 9 are global, and 10 and 11 are a last, shorter round."""


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_every_step(plan: dict, replicas: int, shard: int) -> None:
    if replicas == 2:  # one of the two has to be on time
        plan = {(i, replica): behind for (i, replica), behind in plan.items() if replica == 1}
    check(Case(Scenario(wagma(), replicas, shard, steps=12), plan))


OUTERS = {
    "sgd": {"kind": "sgd", "lr": 0.7},
    "diloco": {"kind": "nesterov", "lr": 0.7, "momentum": 0.9},
    "nesterov-lr-sum": {"kind": "nesterov", "lr": 0.4, "momentum": 0.9, "normalize": "lr_sum"},
    "slowmo": {"kind": "momentum", "momentum": 0.5, "normalize": "lr"},
    "co2": {"kind": "momentum", "momentum": 0.5, "clip": 0.01},
}


@pytest.mark.parametrize("outer", OUTERS.values(), ids=OUTERS.keys())
@pytest.mark.parametrize(("replicas", "shard"), MESHES)
def test_outer_steps_of_other_methods(outer: dict, replicas: int, shard: int) -> None:
    late = {(i, replica): behind for (i, replica), behind in PLANS["iterations-behind"].items() if replica < replicas}
    check(Case(Scenario(wagma(outer=outer), replicas, shard, steps=16), late))


@pytest.mark.parametrize(("size", "seed"), [(2, 0), (2, 1), (4, 2)])
def test_any_plan(size: int, seed: int) -> None:
    """Lateness is random, except that replica `seed` is always on time."""
    draw, late, versions = np.random.default_rng(seed), {}, [-1] * 4
    for iteration in range(22):
        for replica in range(4):
            if iteration % 8 == 7 or replica == seed or iteration == 0 or draw.random() < 0.25:
                versions[replica] = iteration
            else:
                versions[replica] = int(draw.choice([versions[replica], iteration - 1], p=[0.7, 0.3]))
                late[iteration, replica] = iteration - versions[replica]
    assert max(late.values()) > 3
    check(Case(Scenario(wagma(8, size), 4, 1, steps=22, seed=seed), late))


@pytest.mark.parametrize("behind", [1, 2])
def test_late_in_the_very_first_step(behind: int) -> None:
    """No replica waits there either. A late replica contributes the common initial model."""
    late = {(iteration, 1): iteration + 1 for iteration in range(behind)}
    check(Case(Scenario(wagma(), 4, 1, steps=7), late))


@pytest.mark.parametrize("plan", ["again-and-again", "iterations-behind"])
@pytest.mark.parametrize("second_rank", ["ahead", "behind"])
def test_both_ranks_of_a_replica_contribute_the_same_version(plan: str, second_rank: str) -> None:
    """The version that the first rank has finished decides, even if the second has a newer one, or not yet this one."""
    check(Case(Scenario(wagma(), 2, 2, steps=12), PLANS[plan], second_rank))


@pytest.mark.parametrize(("steps", "warmup"), [(4, 0), (5, 0), (6, 0), (3, 3), (7, 3), (8, 3)])
def test_finish(steps: int, warmup: int) -> None:
    """A run may end anywhere in a round."""
    check(Case(Scenario(wagma(warmup_steps=warmup), 4, 1, steps=steps), {(1, 1): 1} if steps - warmup > 1 else {}))


@pytest.mark.parametrize("every", [1, 2])
def test_short_rounds(every: int) -> None:
    """With rounds of one step, the thread has nothing to do."""
    check(Case(Scenario(wagma(every), 4, 1, steps=5)))


def test_rounds_that_grow() -> None:
    """Of QSR's rounds, some have one step, and the last one is cut by the end of the run."""
    sync = wagma(None, period={"kind": "qsr", "base": 1, "alpha": 1.0})
    falling = LRScheduleSection(kind="linear", final_ratio=0.1)
    case = Case(Scenario(sync, 4, 1, steps=20, schedule=falling), {(13, 2): 1, (14, 2): 2, (17, 0): 1})
    ends = ends_of_rounds(case.scenario)
    assert ends[:2] == [0, 1]
    assert ends[-1] == 19
    assert not {13, 14, 17} & set(ends)
    check(case)


@pytest.mark.parametrize(
    ("replicas", "shard", "resume_after"), [(4, 1, 1), (4, 1, 5), (4, 1, 8), (2, 2, 3), (2, 2, 12)]
)
def test_a_resumed_run_is_the_run_left_alone(resume_after: int, replicas: int, shard: int) -> None:
    """Bits are the same, also right after a late step (3, 8) or a round (5), and right before a late step (1)."""
    alone = Case(Scenario(wagma(), replicas, shard, steps=12), {(1, 1): 1, (2, 1): 1, (5, 1): 1, (7, 1): 1, (8, 1): 1})
    resumed = replace(alone, scenario=replace(alone.scenario, resume_after=resume_after))
    check(resumed)[0].assert_close(check(alone)[0], tolerance=0)


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
def test_a_group_of_all_that_are_on_time_is_averaging_every_step(replicas: int, shard: int) -> None:
    groups = Case(Scenario(wagma(size=replicas), replicas, shard, steps=12))
    got = check(groups)[0]
    expected = simulate(Scenario(choices("local_sgd", every=1), replicas, shard, steps=12))
    after_steps = History([*expected.forwards[1:], expected.final], expected.final, got.count)
    got.assert_close(after_steps)


def test_one_replica_is_training_alone() -> None:
    scenario = Scenario(wagma(), 1, 1, steps=12)
    answer = train(Case(scenario, late=None), Comms(None), Comms(None), None)
    for index in range(len(SHAPES)):
        expected = scenario.start(index)
        for step in range(1, 13):
            expected = expected + scenario.noise(step, index)[0] - scenario.pull * expected
            got = assemble(scenario, [answer.states[step - 1]])[index][0]
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(assemble(scenario, [answer.final])[index][0], expected, rtol=0, atol=1e-12)
    assert (answer.late, answer.bytes_sent) == (0, 0)


@pytest.mark.parametrize(
    ("kind", "unit", "replicas", "shard"), [("bf16", 2**-9, 4, 1), ("int8", 1 / 254, 4, 1), ("int8", 1 / 254, 2, 2)]
)
def test_rounded_on_the_wire(kind: str, unit: float, replicas: int, shard: int) -> None:
    """Groups agree to the last bit. An average adds at most two rounding errors: of a message and of the sum."""
    late = {(2, 1): 1, (6, 1): 1, (7, 1): 2}
    case = Case(Scenario(wagma(wire=kind), replicas, shard, steps=12), late)
    got, _ = run(case)
    assert_groups_agree(case, got)
    assert all((block == block[0]).all() for block in got.final)
    expected, oracle = replay(case)
    for step, (ours, theirs) in enumerate(zip(got.states, expected.states, strict=True), start=1):
        error = max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True))
        assert 0 < error < 1.1 * step * 2 * unit * oracle.farthest


@pytest.mark.parametrize(("replicas", "shard", "size"), [(4, 1, 2), (4, 1, 4), (2, 2, 2)])
def test_bytes_are_those_of_the_rings(replicas: int, shard: int, size: int) -> None:
    """There are 10 group averages and 3 of all replicas. A late replica sends as much as others."""
    scenario = Scenario(wagma(size=size), replicas, shard, steps=12)
    values = sum(scenario.size(block) for block in range(len(SHAPES)))
    rings = 10 * 2 * (size - 1) / size + 3 * 2 * (replicas - 1) / replicas
    got, _ = run(Case(scenario, {(2, 1): 1, (6, 1): 1}))
    assert got.bytes_sent == pytest.approx(rings * replicas * values * 8)


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
def test_what_is_over_is_forgotten(replicas: int, shard: int) -> None:
    """The first rank deletes the keys of past iterations at each global average, so the store does not grow."""
    case = Case(Scenario(wagma(), replicas, shard, steps=23))
    first, *others = check(case)[1]
    assert first.forgotten == [i for i in range(19) if i % 5 != 4]
    assert all(other.forgotten == [] for other in others)
