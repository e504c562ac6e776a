"""Tests of equivalent settings, whose runs must be equal, for the methods of test_methods_oracle.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llmtrain.config import LRScheduleSection
from tests.distributed.fake_engine import SHAPES, Scenario, choices, edit, replay
from tests.distributed.threads import simulate
from tests.distributed.trace import Trace, assert_same_bits, assert_same_run

MESHES = [pytest.param(2, 2, id="2x2"), pytest.param(4, 1, id="4x1", marks=pytest.mark.deep)]
FALLING = LRScheduleSection(kind="cosine", warmup_steps=2, final_ratio=0.1)
STREAMING = {"kind": "overlapped", "steps": 2, "fragments": 3, "alpha": 0.5}
MOMENTUM = {"kind": "momentum", "lr": 0.8, "momentum": 0.6}
PULL = {"probability": 0.4, "strength": 0.3}


def both(ours: Any, theirs: Any, replicas: int = 4, shard: int = 1, **run: Any) -> list[Trace]:
    run = {"steps": 14, "schedule": FALLING, **run}
    return [simulate(Scenario(sync, replicas, shard, **run)) for sync in (ours, theirs)]


WITH_A_PERIOD = {
    "local_sgd": ("local_sgd", {}),
    "diloco": ("diloco", {}),
    "edit": ("edit", {}),
    "slowmo": ("slowmo", {}),
    "slowmo-accumulated": ("slowmo", {"outer": {**MOMENTUM, "normalize": "lr_sum"}}),
    "post_local_sgd": ("post_local_sgd", {"warmup_until_lr": None}),
    "co2": ("co2", {}),
    "streaming": ("streaming_diloco", {"schedule": STREAMING}),
    "streaming-fp32": (
        "streaming_diloco",
        {"schedule": {**STREAMING, "fragment_layout": "sequential"}, "wire": "fp32"},
    ),
    "palsgd": ("palsgd", {}),
    "palsgd-layerwise": ("palsgd", {"schedule": "layerwise", "pull": PULL}),
    "edit-int8": ("edit", {"wire": {"kind": "int8", "error_feedback": True}}),
}


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
@pytest.mark.parametrize(("method", "changes"), WITH_A_PERIOD.values(), ids=WITH_A_PERIOD.keys())
def test_qsr_at_a_constant_learning_rate_is_a_fixed_period(
    method: str, changes: dict, replicas: int, shard: int
) -> None:
    """(alpha / lr)^2 = 3.24 gives rounds of 3 steps, and so the bits of a fixed period of 3 steps."""
    periods = {"kind": "steps", "every": 3}, {"kind": "qsr", "base": 1, "alpha": 1.8}
    fixed, following = (choices(method, **{"warmup_steps": 1, **changes, "period": period}) for period in periods)
    constant = LRScheduleSection(kind="constant")
    assert_same_bits(*both(following, fixed, replicas, shard, steps=13, schedule=constant))


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
def test_palsgd_without_a_pull_is_diloco(replicas: int, shard: int) -> None:
    outer = {"kind": "nesterov", "lr": 0.6, "momentum": 0.8}
    palsgd = choices("palsgd", every=4, warmup_steps=3, pull=None, outer=outer)
    diloco = choices("diloco", every=4, warmup_steps=3, outer=outer)
    assert_same_bits(*both(palsgd, diloco, replicas, shard))


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
def test_palsgd_layerwise_is_blocking(replicas: int, shard: int) -> None:
    """An armed synchronization also runs before a pull. With these seeds, some replicas begin a round with a pull."""
    for seed in range(3):
        syncs = [choices("palsgd", every=3, pull=PULL, warmup_steps=2, schedule=s) for s in ("layerwise", "blocking")]
        assert_same_bits(*both(*syncs, replicas, shard, seed=seed))


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
@pytest.mark.parametrize("schedule", ["layerwise", "blocking"])
@pytest.mark.parametrize("steps", [14, 15, 17])
def test_a_edit_on_equal_machines_is_edit(steps: int, schedule: str, replicas: int, shard: int) -> None:
    """If every step takes one second, a round of 3 seconds has 3 steps, and the last round ends with the run."""
    penalty = {"z": 1.5, "temperature": 0.3, "clip": 0.5, "step_weight": 0.5}
    changes = {"warmup_steps": 2, "penalty": penalty, "schedule": schedule}
    seconds = edit(period={"kind": "seconds", "every": 3.0, "min_steps": 0}, every=None, **changes)
    got, expected = both(seconds, edit(every=3, **changes), replicas, shard, steps=steps)
    assert_same_bits(got, expected)
    ends = {*range(1, 3), *range(5, steps, 3), steps}
    assert got.agreed == [[(step, step) for step in sorted(ends)]] * replicas


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
@pytest.mark.parametrize("outer", [MOMENTUM, {**MOMENTUM, "normalize": "lr", "clip": 0.1}], ids=["plain", "lr-clip"])
def test_co2_of_a_single_round_is_diloco(outer: dict, replicas: int, shard: int) -> None:
    """The end of the run waits for the mean of the last round, which is the only one here."""
    syncs = (choices(method, every=4, outer=outer) for method in ("co2", "diloco"))
    assert_same_bits(*both(*syncs, replicas, shard, steps=4))


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
def test_co2_at_a_constant_learning_rate_has_no_gap(replicas: int, shard: int) -> None:
    """The gap penalty changes nothing, not even in the last round, which is shorter."""
    syncs = (choices("co2", every=4, schedule={"kind": "delayed", "gap_penalty": gap}) for gap in (True, False))
    assert_same_bits(*both(*syncs, replicas, shard, steps=18, schedule=LRScheduleSection(kind="constant")))


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
def test_streaming_the_whole_model_at_once_is_diloco(replicas: int, shard: int) -> None:
    outer = {"kind": "nesterov", "lr": 0.6, "momentum": 0.8}
    schedule = {"kind": "overlapped", "steps": 0, "fragments": 1, "alpha": 0.0}
    streaming = choices("streaming_diloco", every=4, outer=outer, schedule=schedule, wire="fp32", warmup_steps=1)
    assert_same_bits(*both(streaming, choices("diloco", every=4, outer=outer, warmup_steps=1), replicas, shard))


NO_PART = {"z": None, "temperature": None, "clip": None}


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
@pytest.mark.parametrize(
    "schedule",
    [{**STREAMING, "steps": 2}, {**STREAMING, "steps": 4}, {"kind": "delayed"}, {"kind": "delayed", "fragments": 3}],
    ids=["soon", "after-a-round", "delayed", "delayed-in-fragments"],
)
def test_a_penalty_without_parts_is_the_mean_that_is_as_late(schedule: dict, replicas: int, shard: int) -> None:
    """A weighted message is sent one step later than a plain one, but taken and applied at the same steps."""
    weighed, mean = (choices("streaming_diloco", 4, schedule=schedule, penalty=part) for part in (NO_PART, None))
    assert_same_bits(*both(weighed, mean, replicas, shard, steps=18))


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
@pytest.mark.parametrize("steps", [14, 15])
def test_a_delayed_a_edit_on_equal_machines_is_a_delayed_edit(steps: int, replicas: int, shard: int) -> None:
    """In rounds of 3 seconds, weights are known and messages sent at once; in rounds of 3 steps, one step later."""
    changes = {"warmup_steps": 2, "penalty": {"z": 0.5, "temperature": 0.3, "clip": 0.5, "step_weight": 0.5}}
    seconds = edit(period={"kind": "seconds", "every": 3.0, "min_steps": 0}, every=None, schedule="delayed", **changes)
    got, expected = both(seconds, edit(every=3, schedule="delayed", **changes), replicas, shard, steps=steps)
    assert expected.counts[1] > 0
    assert_same_bits(got, expected)


@pytest.mark.parametrize("part", range(3))
def test_a_fragment_of_co2_is_co2_that_begins_with_its_turn(part: int) -> None:
    """Blocks of the fake engine are independent. So fragment p of 3, which is synchronized at step p + 1 of every
    round, is CO2 with a first round of p + 1 steps."""
    whole = choices("co2", every=3, schedule={"kind": "delayed", "fragments": 3, "gap_penalty": False})
    got, scenario, outer = simulate(Scenario(whole, 4, 1, steps=14)), Scenario(whole, 4, 1, steps=14), whole.outer
    for block in range(part, len(SHAPES), 3):
        theta = np.repeat(got.forwards[0][block][:1], 4, axis=0)
        anchor, b, sent = theta[0], 0.0, []
        for step in range(1, 15):
            np.testing.assert_allclose(got.forwards[step - 1][block], theta, rtol=0, atol=1e-12)
            theta = theta + scenario.noise(step, block) - scenario.pull * theta
            if step % 3 == (part + 1) % 3:
                sent.append((anchor - theta).mean(0))
                for mean in sent[-2:-1]:
                    b = np.clip(outer.momentum * b + mean, -outer.clip, outer.clip)
                    anchor = anchor - outer.lr * b
                theta = np.repeat(anchor[None], 4, axis=0)


@pytest.mark.parametrize("block", range(len(SHAPES)))
def test_a_fragment_at_once_is_diloco_of_its_own(block: int) -> None:
    """With one fragment per block, each block is DiLoCo by itself. The first round of block p has p + 1 steps."""
    schedule = {"kind": "overlapped", "steps": 0, "fragments": 4, "alpha": 0.0}
    sync = choices("streaming_diloco", every=4, schedule=schedule, wire="fp32", outer={"kind": "sgd", "lr": 0.7})
    got = simulate(Scenario(sync, 4, 1, steps=14))
    theta = np.repeat(got.forwards[0][block][:1], 4, axis=0)
    anchor, scenario = theta[0], Scenario(sync, 4, 1, steps=14)
    for step in range(1, 15):
        np.testing.assert_allclose(got.forwards[step - 1][block], theta, rtol=0, atol=1e-12)
        theta = theta + scenario.noise(step, block) - scenario.pull * theta
        if step % 4 == (block + 1) % 4:
            anchor = anchor - 0.7 * (anchor - theta).mean(0)
            theta = np.repeat(anchor[None], 4, axis=0)


@pytest.mark.parametrize(("method", "normalize"), [("slowmo", "lr"), ("slowmo", "lr_sum"), ("co2", "lr")])
def test_units_do_not_matter_while_they_stay(method: str, normalize: str) -> None:
    """With a constant learning rate and equal rounds, the unit changes only the scale of the momentum."""
    changes = {"schedule": {"kind": "delayed"}} if method == "co2" else {}
    syncs = [choices(method, every=3, outer={**MOMENTUM, "normalize": unit}, **changes) for unit in (normalize, "none")]
    assert_same_run(*both(*syncs, steps=15, schedule=LRScheduleSection(kind="constant")))
    nesterov = {"kind": "nesterov", "lr": 0.6, "momentum": 0.8}
    syncs = [choices("edit", every=3, outer={**nesterov, "normalize": unit}) for unit in (normalize, "none")]
    assert_same_run(*both(*syncs, steps=15, schedule=LRScheduleSection(kind="constant")))


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
@pytest.mark.parametrize("normalize", ["none", "lr", "lr_sum"])
def test_slowmo_without_slow_momentum_is_local_sgd(normalize: str, replicas: int, shard: int) -> None:
    outer = {"kind": "momentum", "lr": 1.0, "momentum": 0.0, "normalize": normalize}
    got, expected = both(choices("slowmo", every=3, outer=outer), choices("local_sgd", every=3), replicas, shard)
    assert_same_run(got, replace(expected, squares=None))  # Local SGD has no pseudo-gradient to report


def test_momentum_of_nothing_is_sgd() -> None:
    outer = {"kind": "momentum", "lr": 0.6, "momentum": 0.0}
    slowmo, diloco = (choices("diloco", every=3, outer=o) for o in (outer, {"kind": "sgd", "lr": 0.6}))
    assert_same_bits(*both(slowmo, diloco))


def test_pulls_of_no_strength_skip_steps() -> None:
    """The parameters of the next forward pass are unchanged after a skipped step."""
    sync = choices("palsgd", every=100, warmup_steps=0, pull={"probability": 0.5, "strength": 0.0})
    got = simulate(Scenario(sync, 4, 1, steps=20))
    moved = [(later[0] != earlier[0]).any(1) for earlier, later in zip(got.forwards, got.forwards[1:], strict=False)]
    assert 0.3 < np.mean(moved) < 0.7


ALONE = {
    "slowmo": (choices("slowmo", every=3), 0),
    "slowmo-accumulated": (choices("slowmo", every=3, outer={**MOMENTUM, "normalize": "lr_sum"}), 0),
    "diloco": (choices("diloco", every=3), 0),
    "edit": (choices("edit", every=3, warmup_steps=0, penalty=None), 0),
    "a_edit": (edit(period={"kind": "seconds", "every": 3.0, "min_steps": 0}, every=None, schedule="layerwise"), 0),
    "co2": (choices("co2", every=3, outer=MOMENTUM, schedule={"kind": "delayed", "gap_penalty": False}), 1),
}


@pytest.mark.parametrize("shard", [1, 2])
@pytest.mark.parametrize(("sync", "late"), ALONE.values(), ids=ALONE.keys())
def test_a_replica_alone_takes_outer_steps(sync: Any, late: int, shard: int) -> None:
    """This is Lookahead: three inner steps, then an outer one with the displacement of `late` rounds before."""
    scenario = Scenario(sync, 1, shard, steps=12, schedule=FALLING)
    got, outer = simulate(scenario), sync.outer
    for block in range(len(SHAPES)):
        theta = anchor = scenario.start(block)
        b, waiting = 0.0, []
        for step in range(1, 13):
            np.testing.assert_allclose(got.forwards[step - 1][block][0], theta, rtol=0, atol=1e-12)
            theta = theta + scenario.rates.at(step) * scenario.direction(step, 0, block, theta)
            if step % 3 == 0:
                lrs = [scenario.rates.at(s) for s in (step - 2, step - 1, step)]
                waiting.append((anchor - theta, {"none": 1.0, "lr": lrs[2], "lr_sum": sum(lrs)}))
                due = waiting[: len(waiting) - late] if step < 12 else waiting
                for moved, units in due:
                    g = units[outer.normalize]
                    b = outer.momentum * b + moved / g
                    anchor = anchor - outer.lr * (g * outer.momentum * b + moved if outer.kind == "nesterov" else g * b)
                waiting = waiting[len(due) :]
                theta = anchor
        np.testing.assert_allclose(got.final[block][0], theta, rtol=0, atol=1e-12)


EVERYTHING = {
    "slowmo": choices("slowmo", every=3),
    "co2": choices("co2", every=3),
    "streaming": choices("streaming_diloco", every=4, schedule=STREAMING, wire="fp32"),
    "palsgd": choices("palsgd", every=3, pull=PULL, warmup_steps=2),
    "diloco-qsr": choices("diloco", period={"kind": "qsr", "base": 2, "alpha": 1.5}),
    "a_edit": edit(
        period={"kind": "seconds", "every": 2.5, "min_steps": 5},
        every=None,
        schedule="layerwise",
        penalty={"z": 1.5, "temperature": 0.3, "clip": 0.5, "step_weight": 0.3},
    ),
}


@pytest.mark.parametrize("sync", EVERYTHING.values(), ids=EVERYTHING.keys())
def test_shards_change_nothing(sync: Any) -> None:
    run = {"steps": 16, "schedule": FALLING, "step_seconds": (0.5, 0.75)}
    whole, halves = (simulate(Scenario(sync, 2, shard, **run)) for shard in (1, 2))
    assert_same_run(halves, whole)


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
def test_edit_with_qsr_layerwise_is_blocking(replicas: int, shard: int) -> None:
    penalty = {"z": 1.5, "temperature": 0.3, "clip": 0.5}
    qsr = {"kind": "qsr", "base": 1, "alpha": 1.2}
    syncs = [edit(period=qsr, every=None, penalty=penalty, schedule=each) for each in ("layerwise", "blocking")]
    got, expected = both(*syncs, replicas, shard, steps=24)
    assert_same_bits(got, expected)
    assert_same_run(got, replay(Scenario(syncs[0], replicas, shard, steps=24, schedule=FALLING)))


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
@pytest.mark.parametrize(("kind", "levels"), [("int8", 127), ("int4", 7)])
def test_rounding_moves_edit_by_less_than_its_bound(kind: str, levels: int, replicas: int, shard: int) -> None:
    """The bound for one round: a message w_n D_n is off by at most half a quantization step, which is max |w_n D_n| /
    levels. The sum is off by at most half a step of its own. The outer step multiplies the error by lr (1 + mu)."""
    outer = {"kind": "nesterov", "lr": 0.8, "momentum": 0.85}
    exact, rounded = (edit(every=4, outer=outer, penalty={"temperature": 0.3}, wire=wire) for wire in ("fp32", kind))
    expected, got = both(exact, rounded, replicas, shard, steps=4, schedule=LRScheduleSection(kind="constant"))
    scenario = Scenario(exact, replicas, shard, steps=4)
    for block in range(len(SHAPES)):
        before = expected.forwards[3][block]
        moved = scenario.start(block) - (before + scenario.noise(4, block) - scenario.pull * before)
        largest = np.abs(moved).max()  # weights sum to 1, so the messages' largest elements sum to at most this
        bound = outer["lr"] * (1 + outer["momentum"]) * (largest + largest * (1 + 0.5 / levels)) * 0.5 / levels
        difference = np.abs(got.final[block] - expected.final[block]).max()
        assert 0 < difference <= bound * (1 + 1e-6)


WIRES = ["bf16", "int8", "int4"]


@pytest.mark.parametrize(
    ("replicas", "shard", "error_feedback"),
    [
        pytest.param(2, 2, False, id="2x2"),
        pytest.param(4, 1, False, id="4x1", marks=pytest.mark.deep),
        pytest.param(4, 1, True, id="4x1-feedback"),
    ],
)
@pytest.mark.parametrize("sync", EVERYTHING.values(), ids=EVERYTHING.keys())
def test_rounded_runs_end_equal(sync: Any, error_feedback: bool, replicas: int, shard: int) -> None:
    """All replicas end with the same bits, and runs with int8 end closer to the exact run than runs with int4."""
    run = {"steps": 16, "schedule": FALLING, "step_seconds": (0.5, 0.75, 1.0, 1.0)[:replicas]}
    rounded = [
        type(sync).model_validate({**sync.model_dump(), "wire": {"kind": kind, "error_feedback": error_feedback}})
        for kind in WIRES
    ]
    exact, *runs = (simulate(Scenario(each, replicas, shard, **run)) for each in (sync, *rounded))
    distances = []
    for got in runs:
        assert all((block == block[0]).all() for block in got.final)
        pairs = zip(got.final, exact.final, strict=True)
        distances.append(max(np.abs(block - expected).max() for block, expected in pairs))
    assert 0 < distances[1] < distances[2] < 1
    assert 0 < distances[0] < 0.05


FED_BACK = {
    "blocking": ("diloco", {}),
    "layerwise": ("diloco", {"schedule": "layerwise"}),
    "at-once": ("diloco", {"schedule": {"kind": "overlapped", "steps": 0, "fragments": 1, "alpha": 0.0}}),
    "co2": ("co2", {"schedule": {"kind": "delayed", "gap_penalty": False}}),
}


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        pytest.param(*case, id=name, marks=() if name == "blocking" else pytest.mark.deep)
        for name, case in FED_BACK.items()
    ],
)
def test_feedback_loses_no_more_than_the_last_message_did(method: str, changes: dict) -> None:
    """With feedback, a run moves by the sum of its unrounded messages D_n / 4, except for the last rounding errors.

    Let d be the largest element of a message and e that of an error. An error is at most half a quantization step of
    the replica's own message and half a step of the sum of 4, so e <= 5 (d + e) / 14. All errors together are at most
    8 (d + e) / 14 <= 8 d / 9. Without feedback, the rounding errors of 40 rounds add up.
    """
    wires = ({"kind": "int4", "error_feedback": error_feedback} for error_feedback in (True, False))
    fed, plain = (choices(method, every=1, outer={"kind": "average"}, wire=wire, **changes) for wire in wires)
    constant = LRScheduleSection(kind="constant")
    for got, has_feedback in zip(both(fed, plain, steps=40, schedule=constant), (True, False), strict=True):
        scenario, missing = Scenario(fed, 4, 1), []
        for block in range(len(SHAPES)):
            moves = [
                [scenario.direction(step, n, block, theta[block][n]) for n in range(4)]
                for step, theta in enumerate(got.forwards, start=1)
            ]
            away = got.final[block][0] - scenario.start(block) - np.mean(moves, axis=1).sum(0)
            missing.append(np.abs(away).max() / (8 / 9 * np.abs(moves).max() / 4))
        assert max(missing) <= 1 if has_feedback else max(missing) > 1
