"""Tests of rounded messages against the oracle, which also rounds them, and of error feedback."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from llmtrain.sync.anchors import flatten
from llmtrain.sync.build_method import build_method
from tests.distributed.fake_engine import FakeEngine, Scenario, choices, edit, replay
from tests.distributed.threads import Threads, simulate
from tests.distributed.trace import assert_same_run

MESHES = [
    pytest.param(2, 2, id="2x2"),
    pytest.param(4, 1, id="4x1", marks=pytest.mark.deep),
    pytest.param(3, 1, id="3x1"),
]
CHUNKS = (((40, 11),), ((300,), (7,)), ((129,),))
"""Shapes of messages with several chunks, so that every rank also rounds a part of the sum."""
KINDS = ["bf16", "int8", "int4", pytest.param("2bit", marks=pytest.mark.deep)]
PENALTY = {"z": 6.0, "min_rounds": 3, "temperature": 0.3, "clip": 0.5}
SPIKES = {(4, 1, 0): math.nan, (9, 1, 1): 50.0, (10, 0, 2): math.inf, (13, 0, 1): 50.0}
"""Factors on updates. Each excludes a replica from a block in one round, two of them from the same block."""


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
@pytest.mark.parametrize("error_feedback", [False, True], ids=["", "feedback"])
@pytest.mark.parametrize("kind", KINDS)
def test_local_sgd_rounds_what_replicas_have_moved_by(
    kind: str, error_feedback: bool, replicas: int, shard: int
) -> None:
    """It does not round the parameters, which are larger."""
    sync = choices("local_sgd", every=3, wire={"kind": kind, "error_feedback": error_feedback})
    scenario = Scenario(sync, replicas, shard, steps=11, shapes=CHUNKS)
    assert_same_run(simulate(scenario), replay(scenario))


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
@pytest.mark.parametrize("schedule", ["blocking", "layerwise"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_replica_that_does_not_count_keeps_its_errors(kind: str, schedule: str, replicas: int, shard: int) -> None:
    """It sends zeros. Its next message that counts again includes the rounding errors of the earlier ones."""
    sync = edit(penalty=PENALTY, schedule=schedule, wire={"kind": kind, "error_feedback": True})
    scenario = Scenario(sync, replicas, shard, steps=18, shapes=CHUNKS, scales=SPIKES)
    got = simulate(scenario)
    assert got.counts[1] >= len(SPIKES), "too few exclusions, so nothing was tested"
    assert_same_run(got, replay(scenario))


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_replica_that_does_not_count_keeps_its_errors_in_flight(kind: str, replicas: int, shard: int) -> None:
    """Each block is a fragment, whose messages are in flight for three steps."""
    schedule = {"kind": "overlapped", "steps": 3, "fragments": 3, "alpha": 0.5}
    wire = {"kind": kind, "error_feedback": True}
    sync = choices("streaming_diloco", every=3, schedule=schedule, penalty={**PENALTY, "ema": 0.3}, wire=wire)
    scenario = Scenario(sync, replicas, shard, steps=20, shapes=CHUNKS, scales=SPIKES)
    got = simulate(scenario)
    assert got.counts[1] >= len(SPIKES), "too few exclusions, so nothing was tested"
    assert_same_run(got, replay(scenario))


OUTER = {"kind": "nesterov", "lr": 0.5, "momentum": 0.7, "normalize": "lr_sum"}
METHODS = {
    "diloco": choices("diloco", every=3, wire="int4"),
    "slowmo": choices("slowmo", every=3, wire={"kind": "int8", "error_feedback": True}),
    "co2": choices("co2", every=3, wire={"kind": "int4", "error_feedback": True}),
    "palsgd": choices("palsgd", every=4, warmup_steps=2, wire="bf16"),
    "edit": choices("edit", every=3, wire={"kind": "fp4", "error_feedback": True}),
    "two bits": choices("diloco", every=3, outer=OUTER, wire={"kind": "2bit", "error_feedback": True}),
    "streaming": choices("streaming_diloco", every=5, outer=OUTER, wire={"kind": "int4", "error_feedback": True}),
}


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
@pytest.mark.parametrize("sync", METHODS.values(), ids=METHODS.keys())
def test_methods(sync: Any, replicas: int, shard: int) -> None:
    scenario = Scenario(sync, replicas, shard, steps=17, shapes=CHUNKS)
    assert_same_run(simulate(scenario), replay(scenario))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", [0, 1])
def test_what_a_broken_replica_sent_does_not_come_back(broken: int, kind: str) -> None:
    """Its NaN is in one mean and no rounding error. After a return to the anchor, the next mean is finite."""
    scenario = Scenario(choices("diloco", wire={"kind": kind, "error_feedback": True}), 2, 1)
    threads = Threads(2)

    def send_twice(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        replica, shard = threads.axes(rank, 2, 1)
        engine = FakeEngine(scenario, rank, 0, replica.device)
        method = build_method(scenario.sync, engine, replica, shard, scenario.rates, seed=0)
        block_sync = method.block_sync
        block_sync.ensure_anchor()
        start = [flatten(block) for block in engine.blocks]
        engine.step(1)
        if rank == broken:
            engine.blocks[0].shards[0][2, 1] = torch.nan
        first = block_sync.start_reduce(0).wait().clone()
        engine.load(start, [])
        engine.step(2)
        return first, block_sync.rounding_errors[0].clone(), block_sync.start_reduce(0).wait()

    for first, error, second in threads.run(send_twice):
        assert first.isnan().any()
        assert error.isfinite().all()
        assert second.isfinite().all()
