"""Tests of synchronization against the float64 oracle: the parameters in every step, and the counts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from llmtrain.config import EditPenaltySection
from llmtrain.errors import TrainingError
from llmtrain.sync.reductions.edit_penalty import EditPenalty
from tests.distributed.fake_engine import Scenario, choices, edit, replay
from tests.distributed.threads import simulate
from tests.distributed.trace import assert_same_run

MESHES = [pytest.param(2, 2, id="2x2"), pytest.param(4, 1, id="4x1")]


ALL_PARTS = {"z": 1.5, "temperature": 0.3, "clip": 0.5}

PLAIN = {
    "local_sgd": choices("local_sgd", every=3),
    "local_sgd-layerwise": choices("local_sgd", every=3, schedule="layerwise"),
    "average-every-step": choices("local_sgd", every=1),
    "diloco": choices("diloco", every=3),
    "diloco-layerwise": choices("diloco", every=3, schedule="layerwise"),
    "sgd-outer": choices("diloco", every=3, outer={"kind": "sgd", "lr": 0.6}),
    "synchronous": choices("synchronous"),
    "warm-up-then-diloco": choices("diloco", every=2, warmup_steps=3),
    "warm-up-then-edit": edit(every=2, warmup_steps=3, penalty={"clip": 1.0, "temperature": 0.5}),
    "warm-up-then-local_sgd": choices("local_sgd", every=2, warmup_steps=3),
    "nothing-but-warm-up": choices("edit", warmup_steps=8),
}


@pytest.mark.parametrize(("replicas", "shard"), [MESHES[0], pytest.param(4, 1, id="4x1", marks=pytest.mark.deep)])
@pytest.mark.parametrize("sync", PLAIN.values(), ids=PLAIN.keys())
def test_methods(sync: Any, replicas: int, shard: int) -> None:
    scenario = Scenario(sync, replicas, shard, steps=8)
    assert_same_run(simulate(scenario), replay(scenario))


@pytest.mark.parametrize(("replicas", "shard"), [(1, 2), (3, 1), (1, 1)], ids=["1x2", "3x1", "1x1"])
@pytest.mark.parametrize("sync", [edit(penalty=ALL_PARTS), choices("local_sgd", every=2)], ids=["edit", "local_sgd"])
def test_meshes_that_are_not_square(sync: Any, replicas: int, shard: int) -> None:
    scenario = Scenario(sync, replicas, shard, steps=7)
    assert_same_run(simulate(scenario), replay(scenario))


PENALTIES = {
    "no-part": {},
    "clip": {"clip": 0.5},
    "clip-that-never-clips": {"clip": 1e6},
    "temperature": {"temperature": 0.3},
    "z": {"z": 1.0},
    "z-by-the-paper": {"z": 1.0, "statistics": "paper"},
    "z-and-temperature": {"z": 1.0, "temperature": 0.3},
    "all": ALL_PARTS,
    "all-by-the-paper": {**ALL_PARTS, "statistics": "paper"},
    "paper-values": {"z": 3.0, "temperature": 1.0, "clip": 10.0, "ema": 0.02, "min_rounds": 10},
}


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES.keys())
def test_penalty_parts(penalty: dict, replicas: int, shard: int) -> None:
    """The rounds suffice for running statistics to matter: the oracle also excludes some ordinary norms."""
    scenario = Scenario(edit(penalty=penalty), replicas, shard, steps=26)
    expected = replay(scenario)
    if penalty.get("z") in (1.0, 1.5):
        assert expected.counts[1] > 3, "too few exclusions, so nothing was tested"
    assert_same_run(simulate(scenario), expected)


@pytest.mark.parametrize("statistics", ["adaptive", "paper"])
@pytest.mark.parametrize("schedule", ["blocking", "layerwise"])
@pytest.mark.parametrize(("replicas", "shard"), MESHES)
def test_an_anomalous_replica(replicas: int, shard: int, schedule: str, statistics: str) -> None:
    """A spike before `min_rounds` counts. A later one is excluded, and changes the statistics little."""
    scales = {(3, 1, 0): 30.0, (9, 1, 1): 30.0, (11, 1, 1): 4.0, (13, 0, 2): 30.0, (13, 1, 3): 30.0}
    rule = {"z": 4.0, "min_rounds": 3, "ema": 0.1, "statistics": statistics}
    sync = edit(penalty={**ALL_PARTS, **rule}, schedule=schedule)
    scenario = Scenario(sync, replicas, shard, steps=16, scales=scales)
    expected = replay(scenario)
    # The adaptive statistics let the spike of 4 pass, because it comes soon after another one.
    assert expected.counts[1] >= (4 if statistics == "paper" else 3)
    assert expected.counts[2] == 0
    assert_same_run(simulate(scenario), expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [None, 0.5])
@pytest.mark.parametrize("z", [None, 3.0])
@pytest.mark.parametrize(("replicas", "shard"), MESHES)
def test_a_non_finite_replica(
    replicas: int, shard: int, z: float | None, temperature: float | None, value: float
) -> None:
    """It is excluded even in the first round, from that block alone, and follows the others again afterwards."""
    sync = edit(penalty={"z": z, "min_rounds": 10, "temperature": temperature, "clip": 1.0})
    scenario = Scenario(sync, replicas, shard, steps=8, scales={(2, 1, 1): value, (6, 0, 0): value})
    got = simulate(scenario)
    assert got.counts[1:] == (2, 0)
    assert all(np.isfinite(block).all() for block in got.final)
    assert_same_run(got, replay(scenario))


@pytest.mark.parametrize("offender", [math.nan, 100.0])
@pytest.mark.parametrize("schedule", ["blocking", "layerwise"])
@pytest.mark.parametrize(("replicas", "shard"), MESHES)
def test_all_anomalous_is_a_rollback(replicas: int, shard: int, schedule: str, offender: float) -> None:
    """The block returns to its anchor. Anchor and momentum do not change, as the later rounds show."""
    scales = {(9, replica, block): offender for replica in range(replicas) for block in (1, 3)}
    sync = edit(penalty={**ALL_PARTS, "z": 6.0, "min_rounds": 3}, schedule=schedule)
    scenario = Scenario(sync, replicas, shard, steps=14, scales=scales)
    got = simulate(scenario)
    assert got.counts[2] == 2
    np.testing.assert_array_equal(got.forwards[10][1], got.forwards[8][1], err_msg="not the anchor")
    assert_same_run(got, replay(scenario))


def test_nobody_has_a_weight_where_all_are_anomalous() -> None:
    """The weights are 0 and not NaN, because they are also reported."""
    norms = torch.tensor([[math.nan, 1.0], [math.inf, 1.0]], dtype=torch.float64)
    for temperature in (None, 1.0):
        section = EditPenaltySection(temperature=temperature)
        assert EditPenalty(section, 2, 2).weigh(norms, torch.ones(2), torch.ones(2)).weights.tolist() == [
            [0.0, 0.5],
            [0.0, 0.5],
        ]


@pytest.mark.parametrize(("statistics", "counts"), [("paper", (4, 8, 4)), ("adaptive", (4, 0, 0))])
def test_a_mean_without_spread(statistics: str, counts: tuple[int, int, int]) -> None:
    """Norms that have always been 0 have no deviation. By the paper's rule, any norm above 0 is infinitely far away."""
    scales = {(step, replica, block): 0.0 for step in range(1, 7) for replica in range(2) for block in range(4)}
    sync = edit(penalty={"z": 5.0, "statistics": statistics})
    scenario = Scenario(sync, 2, 2, steps=8, scales=scales, pull=0.0)
    expected = replay(scenario)
    assert expected.counts == counts
    assert_same_run(simulate(scenario), expected)


RISES = {(step, replica, block): 8.0 for step in range(41, 81) for replica in range(4) for block in range(4)}
"""Factors that make all updates eight times as large from step 41 on."""


@pytest.mark.parametrize("schedule", ["blocking", pytest.param("layerwise", marks=pytest.mark.deep)])
@pytest.mark.parametrize(("replicas", "shard"), MESHES)
def test_a_lasting_rise_is_followed(replicas: int, shard: int, schedule: str) -> None:
    sync = edit(penalty={"z": 3.0, "ema": 0.02, "min_rounds": 10}, schedule=schedule)
    scenario = Scenario(sync, replicas, shard, steps=80, scales=RISES)
    expected = replay(scenario)
    assert 4 <= expected.counts[2] <= 4 * 10, "four blocks are rolled back, in ten rounds at most"
    assert_same_run(simulate(scenario), expected)


def test_a_lasting_rise_locks_the_papers_rule_in() -> None:
    changes = {"z": 3.0, "ema": 0.02, "min_rounds": 10, "statistics": "paper", "max_exclusions": None}
    scenario = Scenario(edit(penalty=changes), 2, 2, steps=80, scales=RISES)
    expected = replay(scenario)
    assert expected.counts[2] > 60
    assert_same_run(simulate(scenario), expected)


def test_a_block_that_is_always_left_out_ends_the_run() -> None:
    """It ends on every rank in the same round, with an error that names replica and block."""
    scales = {(step, 1, 2): math.nan for step in range(1, 20)}
    sync = edit(penalty={"max_exclusions": 7})
    with pytest.raises(TrainingError, match=r"^replica 1: block 2 excluded from the mean 7 rounds in a row"):
        simulate(Scenario(sync, 2, 2, steps=14, scales=scales))
    assert simulate(Scenario(sync, 2, 2, steps=12, scales=scales)).counts == (6, 6, 0)


FINISHES = {
    "truncated": (9, "blocking"),
    "truncated-layerwise": (9, "layerwise"),
    "armed-layerwise": (8, "layerwise"),
    "nothing-left": (8, "blocking"),
    "shorter-than-a-round": (3, "blocking"),
    "shorter-than-a-round-layerwise": (3, "layerwise"),
}


@pytest.mark.parametrize(("steps", "schedule"), FINISHES.values(), ids=FINISHES.keys())
@pytest.mark.parametrize("method", ["diloco", "edit", "local_sgd"])
def test_finish(method: str, steps: int, schedule: str) -> None:
    changes = {"schedule": schedule, "warmup_steps": 2}
    sync = edit(every=3, penalty=ALL_PARTS, **changes) if method == "edit" else choices(method, every=3, **changes)
    scenario = Scenario(sync, 2, 2, steps=steps)
    got = simulate(scenario)
    assert got.counts[0] == math.ceil((steps - 2) / 3)
    assert_same_run(got, replay(scenario))
