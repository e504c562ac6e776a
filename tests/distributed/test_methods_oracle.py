"""Tests of SlowMo, CO2, Streaming DiLoCo, PALSGD, A-EDiT and mixes of their choices against the float64 oracle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from llmtrain.config import LRScheduleSection
from llmtrain.errors import TrainingError
from tests.distributed.fake_engine import Scenario, choices, edit, replay
from tests.distributed.threads import simulate
from tests.distributed.trace import Trace, assert_same_run

MESHES = [
    pytest.param(2, 2, id="2x2"),
    pytest.param(4, 1, id="4x1"),
]
SHARDED = [MESHES[0], pytest.param(4, 1, id="4x1", marks=pytest.mark.deep)]
"""Meshes for methods that only sum, for which four replicas test little more than two."""
CONSTANT = LRScheduleSection(kind="constant")
FALLING = LRScheduleSection(kind="cosine", warmup_steps=2, final_ratio=0.1)
TO_ZERO = LRScheduleSection(kind="linear", final_ratio=0.0)
DROPS = LRScheduleSection(kind="step", decay_at=(0.3, 0.7), decay_factor=0.3)
QSR = {"kind": "qsr", "base": 2, "alpha": 1.5}


def matches_the_oracle(*scenarios: Scenario) -> list[Trace]:
    runs = [simulate(scenario) for scenario in scenarios]
    for got, scenario in zip(runs, scenarios, strict=True):
        try:
            assert_same_run(got, replay(scenario))
        except AssertionError as error:
            error.add_note(f"in {scenario}")
            raise
        if scenario.sync.period.kind != "seconds":
            assert_synchronized_as_reported(got)
    return runs


def assert_synchronized_as_reported(got: Trace) -> None:
    """Check that replicas enter a forward pass with equal parameters if the method has called them synchronized."""
    for says, forward in zip(got.says_synchronized, got.forwards[1:], strict=False):
        assert not says or all((block == block[0]).all() for block in forward)


def test_a_method_says_so_after_a_round_of_blocking_synchronization() -> None:
    """Without this test, `assert_synchronized_as_reported` would pass for a method that never says so."""
    [got] = matches_the_oracle(Scenario(choices("slowmo", every=3), 2, 1, steps=7, schedule=FALLING))
    assert got.says_synchronized[:6] == [False, False, True] * 2


def momentum(**changes: Any) -> dict:
    return {"kind": "momentum", "lr": 0.8, "momentum": 0.6, **changes}


def nesterov(**changes: Any) -> dict:
    return {"kind": "nesterov", "lr": 0.5, "momentum": 0.7, **changes}


OUTER = {
    "slowmo": choices("slowmo", every=3),
    "slowmo-after-warm-up": choices("slowmo", every=3, warmup_steps=4),
    "momentum": choices("slowmo", every=3, outer=momentum()),
    "momentum-accumulated": choices("slowmo", every=3, outer=momentum(normalize="lr_sum")),
    "momentum-clipped": choices("slowmo", every=3, outer=momentum(clip=0.04)),
    "momentum-clipped-lr": choices("slowmo", every=3, outer=momentum(clip=0.05, normalize="lr")),
    "nesterov-rising": choices("diloco", every=2, outer=nesterov(rounds={"momentum_warmup": 3, "lr_warmup": 1})),
    "momentum-falling": choices(
        "slowmo", every=2, outer=momentum(rounds={"lr_warmup": 2, "lr_decay": 4, "lr_final": 0.3})
    ),
    "sgd-falling": choices(
        "local_sgd", every=3, outer={"kind": "sgd", "rounds": {"lr_decay": 3}}, schedule="layerwise"
    ),
    "nesterov-lr": choices("diloco", every=3, outer=nesterov(normalize="lr")),
    "nesterov-accumulated": choices("diloco", every=3, outer=nesterov(normalize="lr_sum")),
    "nesterov-accumulated-qsr": choices("diloco", period=QSR, outer=nesterov(normalize="lr_sum")),
    "edit-accumulated-layerwise": edit(every=3, outer=nesterov(normalize="lr_sum"), penalty={"clip": 0.5}),
    "snoo": choices("snoo", every=3),
    "gpa": choices("gpa", outer={"kind": "gpa", "decay": 0.8, "share": 0.6}),
    "gpa-in-rounds": choices("gpa", every=4, outer={"kind": "gpa", "decay": 0.7}, warmup_steps=3),
    "qsr": choices("qsr", period=QSR),
    "qsr-to-the-first-power": choices("qsr", period={**QSR, "power": 1.0}),
    "edit-qsr": edit(every=None, period=QSR, penalty={"temperature": 0.3, "z": 0.5}),
    "edit-qsr-by-the-paper": edit(every=None, period=QSR, penalty={"z": 0.5, "statistics": "paper"}),
}


@pytest.mark.parametrize(("replicas", "shard"), SHARDED)
@pytest.mark.parametrize("sync", OUTER.values(), ids=OUTER.keys())
def test_outer_steps_and_their_units(sync: Any, replicas: int, shard: int) -> None:
    """With rounds of 3 steps, the last round of the 17 steps has 2, and with TO_ZERO its last learning rate is 0."""
    schedules = [CONSTANT, TO_ZERO, DROPS] if replicas == 4 else [FALLING]
    matches_the_oracle(*(Scenario(sync, replicas, shard, steps=17, schedule=each) for each in schedules))


DELAYED = {
    "co2": choices("co2", every=3),
    "no-gap-penalty": choices("co2", every=3, schedule={"kind": "delayed", "gap_penalty": False}),
    "clipped": choices("co2", every=3, outer=momentum(clip=0.04)),
    "slowmo-outer": choices("co2", every=3, outer=momentum(normalize="lr")),
    "nesterov-accumulated": choices("co2", every=3, outer=nesterov(normalize="lr_sum")),
    "average": choices("co2", every=2, outer={"kind": "average"}),
    "after-warm-up": choices("co2", every=3, warmup_steps=4),
    "qsr": choices("co2", period=QSR, outer=nesterov(normalize="lr")),
    "every-step": choices("co2", every=1),
    "pull": choices("co2", every=3, pull={"probability": 0.4, "strength": 0.3}),
}


@pytest.mark.parametrize(("replicas", "shard"), SHARDED)
@pytest.mark.parametrize("sync", DELAYED.values(), ids=DELAYED.keys())
def test_delayed(sync: Any, replicas: int, shard: int) -> None:
    """The runs end within a round, at a round's end, within the first round, at its end, and within the warm-up."""
    lengths = [17, 16, 15, 7, 5, 3, 2] if replicas == 4 else [17]
    runs = [Scenario(sync, replicas, shard, steps=steps, schedule=FALLING) for steps in lengths]
    if replicas == 2:
        runs.append(Scenario(sync, replicas, shard, steps=17, schedule=TO_ZERO))
        runs.append(Scenario(sync, replicas, shard, steps=16, schedule=DROPS))
    matches_the_oracle(*runs)


def overlapped(steps: int, fragments: int, alpha: float, **changes: Any) -> Any:
    layout = changes.pop("fragment_layout", "strided")
    schedule = {"kind": "overlapped", "steps": steps, "fragments": fragments, "alpha": alpha, "fragment_layout": layout}
    return choices("streaming_diloco", **{"every": 5, "wire": "fp32", "schedule": schedule, **changes})


OVERLAPPED = {
    "two-fragments": overlapped(2, 2, 0.5),
    "sequential": overlapped(2, 2, 0.3, fragment_layout="sequential"),
    "three-uneven": overlapped(1, 3, 0.5),
    "three-sequential": overlapped(3, 3, 0.7, fragment_layout="sequential"),
    "each-block": overlapped(1, 4, 0.5, every=4),
    "one-fragment": overlapped(3, 1, 0.5),
    "whole-round": overlapped(5, 2, 0.5),
    "at-once": overlapped(0, 2, 0.5),
    "at-once-unmixed": overlapped(0, 2, 0.0),
    "unmixed": overlapped(2, 3, 0.0),
    "one-unmixed": overlapped(2, 1, 0.0),
    "anchor-only-counts": overlapped(2, 2, 1.0),
    "more-fragments-than-steps": overlapped(2, 4, 0.5, every=3),
    "after-warm-up": overlapped(2, 2, 0.5, warmup_steps=4),
    "rising": overlapped(2, 3, 0.5, every=3, outer=nesterov(rounds={"momentum_warmup": 2})),
    "normalized": overlapped(2, 2, 0.5, outer=nesterov(normalize="lr")),
    "accumulated": overlapped(2, 2, 0.5, outer=momentum(normalize="lr_sum")),
    "qsr": overlapped(2, 3, 0.5, every=None, period=QSR, outer=nesterov(normalize="lr_sum")),
    "qsr-short-last": overlapped(4, 2, 0.5, every=None, period={"kind": "qsr", "base": 4, "alpha": 2.0}),
    "qsr-short-last-unmixed": overlapped(3, 2, 0.0, every=None, period={"kind": "qsr", "base": 4, "alpha": 2.0}),
    "pull": overlapped(2, 2, 0.5, pull={"probability": 0.4, "strength": 0.3}),
}


@pytest.mark.parametrize(("replicas", "shard"), SHARDED)
@pytest.mark.parametrize("sync", OVERLAPPED.values(), ids=OVERLAPPED.keys())
def test_overlapped(sync: Any, replicas: int, shard: int) -> None:
    """The runs end with messages in flight, just after a message was used or sent, and before any was sent."""
    lengths = [16, 17, 18, 19, 20, 6, 3, 2] if replicas == 4 else [18]
    matches_the_oracle(*(Scenario(sync, replicas, shard, steps=steps, schedule=FALLING) for steps in lengths))


ENDS_WITHOUT_A_RATE = {
    "slowmo": (choices("slowmo", every=3), 16, TO_ZERO),
    "nesterov": (choices("diloco", every=3, outer=nesterov(normalize="lr_sum")), 16, TO_ZERO),
    "one-fragment": (overlapped(3, 1, 0.5, outer=momentum(normalize="lr")), 20, FALLING),
    "two-fragments": (overlapped(2, 2, 0.5, every=3, outer=nesterov(normalize="lr_sum")), 16, TO_ZERO),
    "delayed": (choices("co2", every=3, outer=momentum(normalize="lr")), 16, TO_ZERO),
}
"""Runs whose last synchronization follows no step, or a step whose learning rate is 0. Its outer step must not use a
momentum in units of earlier learning rates."""


@pytest.mark.parametrize(("sync", "steps", "schedule"), ENDS_WITHOUT_A_RATE.values(), ids=ENDS_WITHOUT_A_RATE.keys())
def test_the_last_round_has_no_learning_rate(sync: Any, steps: int, schedule: LRScheduleSection) -> None:
    matches_the_oracle(Scenario(sync, 2, 1, steps=steps, schedule=schedule))


def late(penalty: dict | None = None, **changes: Any) -> Any:
    """Return the `sync` section of CO2 with rounds of 4 steps, a penalty if one is given, and other changes."""
    return choices("co2", **{"every": 4, "penalty": penalty, **changes})


def in_fragments(fragments: int, **changes: Any) -> dict:
    return {"kind": "delayed", "fragments": fragments, **changes}


ALL_PARTS = {"z": 0.5, "temperature": 0.3, "clip": 0.3, "ema": 0.3, "min_rounds": 2}
WEIGHED = {
    "all-parts": overlapped(3, 2, 0.5, penalty=ALL_PARTS),
    "sequential": overlapped(2, 3, 0.3, penalty=ALL_PARTS, fragment_layout="sequential"),
    "whole-round": overlapped(5, 2, 0.5, penalty=ALL_PARTS),
    "unmixed": overlapped(2, 3, 0.0, every=3, penalty=ALL_PARTS),
    "one-fragment-by-the-paper": overlapped(3, 1, 0.7, every=3, penalty={**ALL_PARTS, "statistics": "paper"}),
    "after-warm-up": overlapped(2, 2, 0.5, warmup_steps=4, penalty={**ALL_PARTS, "clip": None}),
    "qsr-short-last": overlapped(
        4, 2, 0.5, every=None, period={"kind": "qsr", "base": 4, "alpha": 2.0}, penalty=ALL_PARTS
    ),
    "pull-accumulated": overlapped(
        3, 2, 0.5, pull={"probability": 0.4, "strength": 0.3}, penalty=ALL_PARTS, outer=nesterov(normalize="lr_sum")
    ),
}


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
@pytest.mark.parametrize("sync", WEIGHED.values(), ids=WEIGHED.keys())
def test_overlapped_with_a_penalty(sync: Any, replicas: int, shard: int) -> None:
    """The runs end before the weights are known, before the mean is used, and after that."""
    lengths = [21, 22, 23, 24, 6, 3] if replicas == 4 else [22]
    runs = matches_the_oracle(*(Scenario(sync, replicas, shard, steps=n, schedule=FALLING) for n in lengths))
    assert runs[0].counts[1] > 0, "no replica was excluded, so nothing was tested"


def test_what_mixing_leaves_is_no_anomaly_in_a_short_last_round() -> None:
    """A displacement begins with alpha x the last one's difference from the mean, even if only one step follows."""
    sync = overlapped(3, 1, 0.5, every=12, penalty={"min_rounds": 5, "temperature": None, "clip": None})
    [got] = matches_the_oracle(Scenario(sync, 2, 1, steps=6 * 12 + 1, pull=0.0, shapes=(((400, 5),),)))
    assert got.counts[1:] == (0, 0)


LATE = {
    "all-parts": late(ALL_PARTS),
    "by-the-paper": late({**ALL_PARTS, "statistics": "paper"}, every=2),
    "after-warm-up": late({**ALL_PARTS, "clip": None}, every=3, warmup_steps=4),
    "qsr-accumulated": late(ALL_PARTS, every=None, period=QSR, outer=nesterov(normalize="lr_sum")),
    "pull": late(ALL_PARTS, pull={"probability": 0.4, "strength": 0.3}, outer=nesterov()),
    "two-fragments": late(schedule=in_fragments(2)),
    "three-uneven": late(every=5, schedule=in_fragments(3, fragment_layout="sequential"), outer=momentum(clip=0.04)),
    "rising": late(every=3, schedule=in_fragments(2), outer=nesterov(rounds={"momentum_warmup": 2, "lr_decay": 4})),
    "no-gap-penalty": late(schedule=in_fragments(2, gap_penalty=False), outer=nesterov(normalize="lr_sum")),
    "more-fragments-than-steps": late(every=2, schedule=in_fragments(4)),
    "fragments-qsr": late(every=None, period=QSR, schedule=in_fragments(3), outer=momentum(normalize="lr")),
    "fragments-all-parts": late(ALL_PARTS, every=3, schedule=in_fragments(2)),
}


@pytest.mark.parametrize(("replicas", "shard"), SHARDED)
@pytest.mark.parametrize("sync", LATE.values(), ids=LATE.keys())
def test_delayed_with_a_penalty_or_in_fragments(sync: Any, replicas: int, shard: int) -> None:
    """The runs end before weights are known, at a fragment's turn, and before the first turn."""
    lengths = [21, 22, 23, 24, 7, 5, 3, 2] if replicas == 4 else [22]
    matches_the_oracle(*(Scenario(sync, replicas, shard, steps=n, schedule=FALLING) for n in lengths))


SPIKES = {
    "not-finite": {(9, 1, 1): math.nan, (13, 0, 2): math.nan, (14, 0, 2): math.nan},
    "far-away": {(12, 1, 1): 300.0, (17, 0, 2): 300.0, (18, 0, 3): 300.0},
    "all": {(step, replica, block): math.nan for step, block in ((12, 1), (13, 2)) for replica in range(4)},
}


APART = {"z": 6.0, "temperature": 0.3, "clip": 0.5, "ema": 0.1, "min_rounds": 2}
WITH_SPIKES = {
    "mixed": overlapped(3, 2, 0.5, penalty=APART),
    "not-mixed": overlapped(3, 2, 1.0, penalty=APART),
    "delayed": late(APART, every=3),
}


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
@pytest.mark.parametrize("sync", WITH_SPIKES.values(), ids=WITH_SPIKES.keys())
@pytest.mark.parametrize("scales", SPIKES.values(), ids=SPIKES.keys())
def test_an_excluded_replica_goes_on_from_the_anchor_alone(scales: dict, sync: Any, replicas: int, shard: int) -> None:
    """Its NaN or far-away values are mixed into nothing. A block that no replica sends returns to its anchor."""
    scales = {place: scale for place, scale in scales.items() if place[1] < replicas}
    [got] = matches_the_oracle(Scenario(sync, replicas, shard, steps=27, scales=scales))
    assert got.counts[1] >= 2 and (got.counts[2] >= 2 or len(scales) == 3)
    assert all(np.isfinite(block).all() for block in got.final)


def test_a_block_that_stays_excluded_ends_the_overlapped_run() -> None:
    scales = {(step, 1, 2): math.nan for step in range(1, 60)}
    sync = overlapped(3, 2, 0.5, penalty={"max_exclusions": 7})
    with pytest.raises(TrainingError, match=r"^replica 1: block 2 excluded from the mean 7 rounds in a row"):
        simulate(Scenario(sync, 2, 2, steps=40, scales=scales))


PULL = {"probability": 0.4, "strength": 0.3}
PALSGD = {
    "blocking": choices("palsgd", every=4, warmup_steps=3, pull=PULL),
    "layerwise": choices("palsgd", every=4, warmup_steps=3, pull=PULL, schedule="layerwise"),
    "skips-only": choices("palsgd", every=4, warmup_steps=3, pull={**PULL, "strength": 0.0}),
    "to-the-anchor": choices("palsgd", every=4, warmup_steps=0, pull={**PULL, "strength": 0.4}),
    "often": choices("palsgd", every=3, warmup_steps=0, pull={"probability": 0.9, "strength": 0.5}),
    "edit": edit(every=3, penalty={"z": 1.5, "temperature": 0.3, "clip": 0.5}, pull=PULL),
    "slowmo": choices("slowmo", every=3, pull=PULL),
    "local_sgd": choices("local_sgd", every=3, pull=PULL, schedule="layerwise"),
}


@pytest.mark.parametrize(("replicas", "shard"), SHARDED)
@pytest.mark.parametrize("sync", PALSGD.values(), ids=PALSGD.keys())
def test_pull(sync: Any, replicas: int, shard: int) -> None:
    """Each seed draws other steps for pulls, some of them the first of a round."""
    runs = [Scenario(sync, replicas, shard, steps=18, seed=seed, schedule=FALLING) for seed in range(3)]
    matches_the_oracle(*runs)


def test_every_replica_draws_for_itself() -> None:
    """A pull in the first step of a run moves nothing, so in some runs only some replicas move in that step."""
    runs = [Scenario(PALSGD["to-the-anchor"], 4, 1, steps=2, seed=seed) for seed in range(8)]
    moved = [(got.forwards[1][0] != got.forwards[0][0]).any(1) for got in matches_the_oracle(*runs)]
    assert any(some.any() and not some.all() for some in moved)
    assert 8 < sum(some.sum() for some in moved) < 32


def timed(method: str = "a_edit", every: float = 3.0, min_steps: int = 0, **changes: Any) -> Any:
    period = {"kind": "seconds", "every": every, "min_steps": min_steps}
    if method == "a_edit":
        penalty = {"z": 1.5, "temperature": 0.3, "clip": 0.5, "ema": 0.3, "min_rounds": 2}
        changes = {"warmup_steps": 2, "penalty": {**penalty, **changes.pop("penalty", {})}, **changes}
    return choices(method, period=period, **changes)


SECONDS = (0.5, 1.0, 0.75, 1.25)
TIMED = {
    "layerwise": timed(),
    "blocking": timed(schedule="blocking"),
    "no-warm-up": timed(warmup_steps=0),
    "nothing-but-warm-up": timed(warmup_steps=40),
    "steps-as-weights": timed(penalty={"step_weight": 0.4}),
    "steps-alone": timed(penalty={"step_weight": 1.0, "temperature": None}),
    "steps-and-anomalies": timed(every=2.0, penalty={"step_weight": 0.5, "z": 0.5}),
    "steps-and-anomalies-by-the-paper": timed(every=2.0, penalty={"step_weight": 0.5, "z": 0.5, "statistics": "paper"}),
    "min-steps": timed(every=1.5, min_steps=14),
    "never-enough-steps": timed(every=1.5, min_steps=10_000),
    "one-step-a-round": timed(every=0.25),
    "one-round": timed(every=25.0),
    "diloco": timed("diloco", outer=nesterov(normalize="lr_sum")),
    "slowmo": timed("slowmo", outer=momentum(normalize="lr"), warmup_steps=3),
    "local_sgd": timed("local_sgd", schedule="layerwise"),
    "pull": timed("palsgd", pull=PULL, warmup_steps=3),
    "delayed": timed(schedule="delayed", outer=nesterov(normalize="lr_sum")),
    "delayed-steps-and-anomalies": timed(every=2.0, schedule="delayed", penalty={"step_weight": 0.5, "z": 0.5}),
    "delayed-min-steps": timed(every=1.5, min_steps=14, schedule="delayed"),
    "co2": timed("co2", outer=momentum(normalize="lr"), warmup_steps=3),
}


def of_different_speeds(sync: Any, replicas: int, shard: int) -> Scenario:
    """Return a run whose replicas have different speeds, and in which the first and the last replica halt once."""
    speeds = {"step_seconds": SECONDS[:replicas], "delays": {(7, 0): 2.0, (12, replicas - 1): 4.5}}
    return Scenario(sync, replicas, shard, steps=24, schedule=FALLING, **speeds)


@pytest.mark.parametrize(("replicas", "shard"), SHARDED)
@pytest.mark.parametrize("sync", TIMED.values(), ids=TIMED.keys())
def test_rounds_of_seconds(sync: Any, replicas: int, shard: int) -> None:
    """The replicas have different speeds in one run and the same speed in the other."""
    even = Scenario(sync, replicas, shard, steps=16, schedule=FALLING)
    got, _ = matches_the_oracle(of_different_speeds(sync, replicas, shard), even)
    if sync.warmup_steps < 24 and sync.period.every > 0.5:
        assert len({one[-1][0] for one in got.agreed}) > 1, "all replicas took as many steps: nothing was tested"


@pytest.mark.parametrize(
    ("replicas", "shard"), [pytest.param(3, 1, id="3x1"), pytest.param(1, 1, id="1x1", marks=pytest.mark.deep)]
)
@pytest.mark.parametrize("syncs", [OUTER, DELAYED, OVERLAPPED, PALSGD], ids=["outer", "delayed", "overlapped", "pull"])
def test_three_replicas_and_one(syncs: dict, replicas: int, shard: int) -> None:
    matches_the_oracle(*(Scenario(sync, replicas, shard, steps=18, schedule=FALLING) for sync in syncs.values()))


@pytest.mark.parametrize("replicas", [3, pytest.param(1, marks=pytest.mark.deep)])
def test_three_replicas_and_one_in_rounds_of_seconds(replicas: int) -> None:
    matches_the_oracle(*(of_different_speeds(sync, replicas, 1) for sync in TIMED.values()))


def test_the_run_ends_on_its_steps() -> None:
    """The last exchanges come earlier, so that replicas take less than one step too many on average."""
    for sync in (timed(every=10.0), timed(every=7.0, min_steps=60)):
        (got,) = matches_the_oracle(Scenario(sync, 4, 1, steps=40, step_seconds=SECONDS))
        done = sum(replica[-1][0] for replica in got.agreed)
        assert 4 * 40 <= done < 4 * (40 + 1)
        assert {replica[-1][1] for replica in got.agreed} == {40}


@pytest.mark.parametrize("every", [5.0, 10.0, 600.0])
def test_the_run_ends_on_its_steps_whatever_the_pace_becomes(every: float) -> None:
    """Replica 0 becomes four times as fast at its step 12, and replica 1 ceases to be so at its step 40."""
    fast = {(step, 0): -0.75 for step in range(12, 200)} | {(step, 1): -0.75 for step in range(1, 40)}
    scenario = Scenario(timed(every=every), 2, 2, steps=40, step_seconds=(1.0, 1.0), delays=fast)
    (got,) = matches_the_oracle(scenario)
    done = sum(replica[-1][0] for replica in got.agreed)
    assert 2 * 40 <= done < 2 * (40 + 1)


def test_weights_by_steps() -> None:
    """With `step_weight` 1, replicas count in proportion to their steps, here 4, 2 and 1. The global step is the mean
    of these, rounded down."""
    sync = timed(every=4.0, warmup_steps=0, penalty={"step_weight": 1.0, "z": None, "clip": None}, outer="average")
    scenario = Scenario(sync, 3, 1, steps=100, step_seconds=(1.0, 2.0, 4.0))
    (got,) = matches_the_oracle(scenario)
    assert [replica[0] for replica in got.agreed] == [(4, 2), (2, 2), (1, 2)]
