"""Tests of a few scenarios of every schedule against the oracle on gloo, which carries messages in real runs. The other scenarios
run on threads. test_wagma_freely.py has WAGMA."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch.distributed.device_mesh import init_device_mesh

from llmtrain.config import LRScheduleSection
from llmtrain.parallel.comms import Comms
from tests.distributed.fake_engine import Answer, Scenario, choices, edit, replay, trace_of, train
from tests.distributed.pool import RankPool
from tests.distributed.trace import Trace, assert_same_run

FALLING = LRScheduleSection(kind="cosine", warmup_steps=2, final_ratio=0.1)
PENALTY = {"z": 1.5, "temperature": 0.3, "clip": 0.5}
SECONDS = {"kind": "seconds", "every": 3.0, "min_steps": 0}
STREAMING = {"kind": "overlapped", "steps": 2, "fragments": 3, "alpha": 0.5}
SCHEDULES = {
    "blocking": choices("diloco", every=3, warmup_steps=2),
    "layerwise": edit(every=3, penalty=PENALTY),
    "without an anchor": choices("local_sgd", every=3, schedule="layerwise"),
    "delayed": choices("co2", every=3),
    "overlapped": choices("streaming_diloco", every=5, wire="fp32", schedule=STREAMING),
    "delayed, weighed": choices("co2", every=3, penalty=PENALTY, schedule={"kind": "delayed", "fragments": 2}),
    "overlapped, weighed": choices(
        "streaming_diloco", every=5, wire="fp32", schedule={**STREAMING, "steps": 4}, penalty=PENALTY
    ),
    "pull": choices("palsgd", every=4, warmup_steps=2, pull={"probability": 0.4, "strength": 0.3}),
}
WIRES = {
    "bf16": choices("diloco", every=3, wire="bf16"),
    "int8": edit(every=3, penalty=PENALTY, wire={"kind": "int8", "error_feedback": True}),
    "int4": choices("streaming_diloco", every=5, schedule=STREAMING, wire={"kind": "int4", "error_feedback": True}),
}
SPEEDS = {"step_seconds": (0.5, 1.25), "delays": {(7, 1): 2.0}}


def simulate_on_gloo(ranks: RankPool, scenarios: Sequence[Scenario]) -> list[Trace]:
    """Run the scenarios one after another on one mesh, which is built only once, and return their traces."""
    (replicas, shard) = mesh = (scenarios[0].replicas, scenarios[0].shard)
    assert all((scenario.replicas, scenario.shard) == mesh for scenario in scenarios)
    by_rank = ranks.run(_train_on_mesh, list(scenarios), world_size=replicas * shard, timeout=60)
    return [trace_of(scenario, answers) for scenario, *answers in zip(scenarios, *by_rank, strict=True)]


def _train_on_mesh(scenarios: Sequence[Scenario]) -> list[Answer]:
    """Run the scenarios on this rank."""
    mesh = (scenarios[0].replicas, scenarios[0].shard)
    axes = init_device_mesh("cpu", mesh, mesh_dim_names=("replica", "shard"))
    return [train(scenario, *(Comms(axes.get_group(name)) for name in ("replica", "shard"))) for scenario in scenarios]


def are_the_oracles(ranks: RankPool, scenarios: dict[str, Scenario]) -> None:
    for name, got in zip(scenarios, simulate_on_gloo(ranks, list(scenarios.values())), strict=True):
        try:
            assert_same_run(got, replay(scenarios[name]))
        except AssertionError as error:
            error.add_note(f"in {name}")
            raise


@pytest.mark.parametrize(("replicas", "shard"), [(2, 2), (4, 1)], ids=["2x2", "4x1"])
def test_schedules(ranks: RankPool, replicas: int, shard: int) -> None:
    run = {"steps": 17, "schedule": FALLING}
    are_the_oracles(ranks, {name: Scenario(sync, replicas, shard, **run) for name, sync in SCHEDULES.items()})


def test_wires(ranks: RankPool) -> None:
    are_the_oracles(ranks, {name: Scenario(sync, 4, 1, steps=16) for name, sync in WIRES.items()})


def test_rounds_of_seconds_and_resumed_runs(ranks: RankPool) -> None:
    timed = {"every": None, "period": SECONDS, "warmup_steps": 2, "penalty": {**PENALTY, "step_weight": 0.4}}
    scenarios = {
        "seconds": Scenario(edit(**timed), steps=16, **SPEEDS),
        "seconds, blocking": Scenario(edit(**timed, schedule="blocking"), steps=16, **SPEEDS),
        "seconds, delayed": Scenario(edit(**timed, schedule="delayed"), steps=16, **SPEEDS),
        "seconds, resumed": Scenario(edit(**timed), steps=16, resume_after=range(2, 16, 3), **SPEEDS),
        "delayed, resumed": Scenario(SCHEDULES["delayed"], steps=17, schedule=FALLING, resume_after=(4, 11)),
        "int4, resumed": Scenario(WIRES["int4"], steps=16, resume_after=(7, 12)),
    }
    are_the_oracles(ranks, scenarios)
