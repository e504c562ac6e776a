"""Tests of reductions that weight replicas by tokens or norms, with every schedule, against the float64 oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from llmtrain.config import LRScheduleSection
from llmtrain.parallel.comms import Comms
from llmtrain.sync.build_method import build_method
from tests.distributed.fake_engine import FakeEngine, Scenario, choices, replay
from tests.distributed.threads import simulate
from tests.distributed.trace import assert_same_bits, assert_same_run

FALLING = LRScheduleSection(kind="cosine", warmup_steps=2, final_ratio=0.1)
KINDS = ("token_weighted", "radial", "median_norm")
SECONDS = {"kind": "seconds", "every": 3.0, "min_steps": 0}
SPEEDS = {"step_seconds": (0.5, 1.25, 1.0, 0.75), "delays": {(7, 1): 2.0}}
BY_SUM = {"kind": "nesterov", "lr": 0.5, "momentum": 0.7, "normalize": "lr_sum"}
MESHES = ((2, 2), (4, 1), (4, 2))
SCHEDULES: dict[str, dict[str, Any]] = {
    "blocking": {"method": "diloco", "every": 3},
    "layerwise": {"method": "diloco", "every": 3, "schedule": "layerwise", "outer": "average"},
    "overlapped": {
        "method": "streaming_diloco",
        "every": 5,
        "wire": "fp32",
        "schedule": {"kind": "overlapped", "steps": 3, "fragments": 2, "alpha": 0.4},
    },
    "delayed": {"method": "co2", "every": 3, "schedule": {"kind": "delayed", "fragments": 2}},
    "of-seconds": {"method": "diloco", "period": SECONDS, "outer": BY_SUM},
    "delayed-of-seconds": {"method": "co2", "period": SECONDS, "outer": BY_SUM},
    "rounded": {"method": "diloco", "every": 3, "wire": {"kind": "int8", "error_feedback": True}},
    "largest-values": {
        "method": "sparseloco",
        "every": 3,
        "wire": {"kind": "topk", "keep": 900, "error_feedback": True},
    },
}


def scenario(kind: str, schedule: str, replicas: int = 2, shard: int = 2, **run: Any) -> Scenario:
    changes = {"warmup_steps": 2, **SCHEDULES[schedule]}
    sync = choices(changes.pop("method"), reduction=kind, **changes)
    speeds = {**SPEEDS, "step_seconds": SPEEDS["step_seconds"][:replicas]} if sync.period.is_timed else {}
    return Scenario(sync, replicas, shard, **{"steps": 17, "schedule": FALLING, **speeds, **run})


OFTEN = {(4, 1): ("layerwise", "delayed", "of-seconds", "rounded"), (4, 2): ("blocking", "overlapped")}
"""Schedules that are tested outside `deep`, by mesh."""
PLACES = [
    pytest.param(kind, name, *mesh, marks=() if name in OFTEN.get(mesh, ()) else pytest.mark.deep)
    for kind in KINDS
    for name in SCHEDULES
    for mesh in MESHES
    if (kind, name) != ("radial", "largest-values")
]


@pytest.mark.parametrize(("kind", "schedule", "replicas", "shard"), PLACES)
def test_the_oracle_finds_the_same(kind: str, schedule: str, replicas: int, shard: int) -> None:
    run = scenario(kind, schedule, replicas, shard)
    got = simulate(run)
    assert_same_run(got, replay(run))
    plain = simulate(scenario("mean", schedule, replicas, shard))
    distance = max(np.abs(one - other).max() for one, other in zip(got.final, plain.final, strict=True))
    assert distance > 1e-4, "the plain mean ends at the same parameters, so nothing was tested"


@pytest.mark.parametrize("schedule", ["blocking", "overlapped"])
@pytest.mark.parametrize("kind", ["radial", "median_norm"])
def test_a_replica_that_is_not_finite_does_not_count(kind: str, schedule: str) -> None:
    run = scenario(kind, schedule, 4, 1, steps=22, scales={(9, 1, 1): math.nan, (13, 0, 2): math.nan})
    got = simulate(run)
    assert_same_run(got, replay(run))
    assert got.counts[1] >= 2 and all(np.isfinite(block).all() for block in got.final)


@pytest.mark.parametrize("schedule", ["blocking", "overlapped"])
def test_steps_that_were_taken_back_count_no_tokens(schedule: str) -> None:
    run = scenario("token_weighted", schedule, 1, 1, steps=9)
    engine = FakeEngine(run, 0, 0, torch.device("cpu"))
    method = build_method(run.sync, engine, Comms(None), Comms(None), run.rates, seed=0)
    seen = []
    for step in (1, 2, 3, 4):
        method.begin_step(step, 0.1)
        engine.step(step)
        if step == 4:
            method.roll_back()
        method.end_step(step, 5)
        state = method.state_dict()["schedule"]
        seen.append(
            [since["tokens"] for since in ([state["round"]] if schedule == "blocking" else state["local_steps"])]
        )
    parts = len(seen[0])
    assert seen == [[tokens] * parts for tokens in (0, 0, 5, 5)], (
        "two synchronous steps, a local one, and one that was rolled back"
    )


@pytest.mark.parametrize("schedule", ["blocking", "overlapped"])
def test_equal_tokens_are_the_mean(schedule: str) -> None:
    of_tokens = simulate(scenario("token_weighted", schedule, 4, 1, equal_tokens=True))
    assert_same_bits(of_tokens, simulate(scenario("mean", schedule, 4, 1)))


def test_one_replica_is_its_own_mean_by_every_reduction() -> None:
    """Its direction is the mean direction, and its norm the mean and the median of all norms."""
    runs = [scenario(kind, "blocking", 1, 2) for kind in ("mean", *KINDS)]
    plain, *weighed = map(simulate, runs)
    for got in weighed:
        assert_same_run(got, plain)
