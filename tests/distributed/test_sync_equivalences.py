"""Tests of equivalent settings, whose runs must be equal: methods, schedules and meshes against each other."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from llmtrain.config import LRScheduleSection
from llmtrain.parallel.collectives import PendingCollective
from llmtrain.parallel.comms import Comms
from llmtrain.sync.build_method import build_method
from llmtrain.sync.method import Method
from tests.distributed.fake_engine import SHAPES, SPIKES, FakeEngine, Scenario, choices, edit, train
from tests.distributed.threads import simulate
from tests.distributed.trace import Trace, assert_close, assert_same_bits, assert_same_run

MESHES = [pytest.param(2, 2, id="2x2"), pytest.param(4, 1, id="4x1", marks=pytest.mark.deep)]


@cache
def scheduled(method: str, replicas: int, shard: int, prefetch: int | None) -> Trace:
    """Return a run that is layer-wise with a `prefetch`, or blocking if `prefetch` is None."""
    schedule = "blocking" if prefetch is None else {"kind": "layerwise", "prefetch": prefetch}
    changes = {"warmup_steps": 1, "schedule": schedule}
    penalty = {"z": 6.0, "min_rounds": 3, "temperature": 0.3, "clip": 0.5}
    sync = edit(**changes, penalty=penalty) if method == "edit" else choices(method, every=2, **changes)
    return simulate(Scenario(sync, replicas, shard, steps=18, scales=SPIKES if method == "edit" else {}))


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
@pytest.mark.parametrize("prefetch", [0, 2, *(pytest.param(n, marks=pytest.mark.deep) for n in (1, len(SHAPES) + 1))])
@pytest.mark.parametrize("method", ["local_sgd", "diloco", "edit"])
def test_layerwise_is_blocking(method: str, prefetch: int, replicas: int, shard: int) -> None:
    """Every forward pass computes with the same bits, however many reductions are in flight."""
    blocking = scheduled(method, replicas, shard, None)
    assert_same_bits(scheduled(method, replicas, shard, prefetch), blocking)
    if method == "edit":
        assert blocking.counts[1] > 3
        assert blocking.counts[2] > 0


def test_the_counters_of_the_log_change_no_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outer steps depend on the number of the round, but the count for the log is only written, never read."""
    outer = {"kind": "nesterov", "rounds": {"lr_warmup": 2, "momentum_warmup": 4}}
    scenario = Scenario(choices("diloco", every=2, outer=outer), steps=11, resume_after=7)
    expected, end_step = simulate(replace(scenario, resume_after=None)), Method.end_step

    def without_counters(self: Method, step: int, tokens: float) -> None:
        end_step(self, step, tokens)
        self.stats.count = 0

    monkeypatch.setattr(Method, "end_step", without_counters)
    assert_same_bits(simulate(scenario), expected)


@pytest.mark.parametrize("prefetch", [0, 1, 2, len(SHAPES) + 1])
def test_layerwise_runs_inside_the_forward(prefetch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing happens at the end of the step. Each block follows just before its own forward pass. By then, the
    reductions of `prefetch` more blocks have started."""
    one = Comms(None)
    sync = edit(every=1, schedule={"kind": "layerwise", "prefetch": prefetch})
    scenario = Scenario(sync, 1, 1)
    engine = FakeEngine(scenario, 0, 0, one.device)
    method = build_method(sync, engine, one, Comms(None), scenario.rates, seed=0)
    method.begin_step(1, 1.0)
    engine.step(1)

    published, started, seen = [], [], []
    reduce = one.start_all_reduce
    monkeypatch.setattr(engine, "parameters_changed", lambda block: published.append(block.name))
    monkeypatch.setattr(one, "start_all_reduce", lambda *args: started.append(args) or reduce(*args))
    engine.register_block_hook(lambda index: seen.append((list(published), len(started))))
    method.end_step(1)
    assert (published, started) == ([], [])
    method.begin_step(2, 1.0)
    engine.forward()
    names = [block.name for block in engine.blocks]
    assert seen == [(names[:done], min(done + prefetch, len(names))) for done in range(1, len(names) + 1)]


class Counted(PendingCollective):
    """Reduction that records how many are in flight when it is waited for, itself included."""

    counts: ClassVar[list[int]] = []
    """Numbers of reductions: [begun, waited for]."""
    seen: ClassVar[list[int]] = []

    def wait(self) -> torch.Tensor:
        begun, waited_for = self.counts
        self.seen.append(begun - waited_for)
        self.counts[1] += 1
        return super().wait()


class Counting(Comms):
    """Comms of a single replica, whose reductions are counted."""

    def start_all_reduce(self, tensor: torch.Tensor, *args: Any) -> Counted:
        Counted.counts[0] += 1
        return Counted(self, "", None, tensor)


AT_ONCE = {"kind": "overlapped", "steps": 0, "fragments": 1, "alpha": 0.5}


@pytest.mark.parametrize(
    ("sync", "prefetch"),
    [
        (edit(every=1, schedule="blocking"), 2),
        *((edit(every=1, schedule={"kind": "layerwise", "prefetch": ahead}), ahead) for ahead in (0, 1, 5)),
        (choices("streaming_diloco", every=100, wire="fp32", schedule=AT_ONCE), 2),  # synchronizes only in `finish`
    ],
    ids=["blocking", "layerwise-0", "layerwise-1", "layerwise-5", "together"],
)
def test_no_more_reductions_are_under_way_than_said(sync: Any, prefetch: int) -> None:
    """There are no fewer either. Each takes memory, and hides the latency of the ones before it."""
    Counted.counts[:], Counted.seen[:] = [0, 0], []
    scenario = Scenario(sync, 1, 1, steps=1, shapes=(((3,),),) * 7)
    train(scenario, Counting(None), Comms(None))
    assert Counted.seen == [min(prefetch + 1, 7 - index) for index in range(7)]
    assert Counted.counts == [7, 7]


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
@pytest.mark.parametrize("schedule", ["blocking", "layerwise"])
def test_edit_without_penalty_is_diloco(schedule: str, replicas: int, shard: int) -> None:
    outer = {"kind": "nesterov", "lr": 0.7, "momentum": 0.9}
    bare = choices("edit", every=3, warmup_steps=2, outer=outer, penalty=None, schedule=schedule)
    diloco = choices("diloco", every=3, warmup_steps=2, outer=outer)
    got, expected = (simulate(Scenario(sync, replicas, shard, steps=10)) for sync in (bare, diloco))
    assert_same_bits(got, expected)


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
@pytest.mark.parametrize(
    "outer",
    [{"kind": "sgd", "lr": 1.0}, {"kind": "nesterov", "lr": 1.0, "momentum": 0.0}],
    ids=["sgd", "nesterov"],
)
def test_diloco_with_a_plain_outer_step_is_local_sgd(outer: dict, replicas: int, shard: int) -> None:
    diloco = choices("diloco", every=3, outer=outer)
    local_sgd = choices("local_sgd", every=3)
    got, expected = (simulate(Scenario(sync, replicas, shard, steps=10)) for sync in (diloco, local_sgd))
    assert_same_run(got, replace(expected, squares=None))  # Local SGD has no pseudo-gradient to report


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
def test_averaging_after_every_sgd_step_is_synchronous(replicas: int, shard: int) -> None:
    averaged = simulate(Scenario(choices("local_sgd", every=1), replicas, shard))
    synchronous = simulate(Scenario(choices("synchronous"), replicas, shard))
    assert (averaged.counts[0], synchronous.counts[0]) == (8, 0)
    assert_close(averaged, synchronous)


@pytest.mark.parametrize(("method", "lr", "momentum"), [("diloco", 0.7, 0.9), ("edit", 0.8, 0.85)])
def test_first_nesterov_displacement(method: str, lr: float, momentum: float) -> None:
    """It is (1 + mu) lr D after the first round, and mu^2 lr D more after a second round in which no replica moved."""
    changes = {"outer": {"kind": "nesterov", "lr": lr, "momentum": momentum}, "penalty": None, "warmup_steps": 0}
    still = {(step, replica, block): 0.0 for step in (3, 4) for replica in range(2) for block in range(len(SHAPES))}
    run = {"steps": 4, "scales": still, "pull": 0.0}
    never = simulate(Scenario(choices(method, every=100, **changes), **run))
    twice = simulate(Scenario(choices(method, every=2, **changes), **run))
    for block in range(len(SHAPES)):
        start, moved = never.forwards[0][block], never.forwards[2][block]
        first = (1 + momentum) * lr * (start - moved).mean(0)
        second = momentum**2 * lr * (start - moved).mean(0)
        np.testing.assert_allclose(twice.forwards[2][block], start - first, rtol=0, atol=1e-12)
        np.testing.assert_allclose(twice.final[block], start - first - second, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("replicas", "shard"), [(2, 2), (4, 1), (1, 4)], ids=["2x2", "4x1", "1x4"])
def test_every_element_of_every_parameter_is_averaged(seed: int, replicas: int, shard: int) -> None:
    """This holds for all sizes: some shards are empty on some ranks, and single elements are not skipped."""
    draw = np.random.default_rng(seed)
    shapes = tuple(
        tuple(tuple(draw.integers(1, 8, draw.integers(1, 4)).tolist()) for _ in range(draw.integers(1, 5)))
        for _ in range(draw.integers(1, 6))
    )
    without_anchor = choices("local_sgd", every=1)
    with_anchor = edit(every=1, outer={"kind": "average"})
    for sync in (without_anchor, with_anchor):
        scenario = Scenario(sync, replicas, shard, steps=1, shapes=shapes, seed=seed)
        for block, result in enumerate(simulate(scenario).final):
            mean = (1 - scenario.pull) * scenario.start(block) + scenario.noise(1, block).mean(0)
            np.testing.assert_allclose(result, mean[None].repeat(replicas, 0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
@pytest.mark.parametrize("method", ["local_sgd", "diloco", "edit"])
def test_bytes_are_those_of_the_rings(method: str, replicas: int, shard: int) -> None:
    """Per round, a rank sends 2 (N-1)/N of its shards' bytes, plus a few scalars that the replicas gather."""
    sync = choices(method, every=2, warmup_steps=2)
    scenario = Scenario(sync, replicas, shard, steps=8)
    values = sum(scenario.size(block) for block in range(len(SHAPES)))
    vectors = 3 * replicas * 2 * (replicas - 1) / replicas * values * 8
    scalars = simulate(scenario).bytes_sent - vectors
    assert 0 <= scalars <= 3 * replicas * shard * (replicas - 1) * (len(SHAPES) + 5) * 8


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
def test_offload_changes_no_bit(replicas: int, shard: int) -> None:
    got, expected = (
        simulate(Scenario(edit(warmup_steps=2, offload=offload), replicas, shard, resume_after=5))
        for offload in (True, False)
    )
    assert_same_bits(got, expected)


def test_qsr_synchronizes_more_rarely_as_the_learning_rate_falls() -> None:
    """With half the learning rate, a round is four times as long. The last round is cut by the end of the run."""
    sync = choices("qsr", period={"kind": "qsr", "base": 1, "alpha": 1.0})
    falling = LRScheduleSection(kind="linear", final_ratio=0.0)  # 1, 15/16, 14/16, ... of the peak in 16 steps
    got = simulate(Scenario(sync, 4, 1, steps=16, schedule=falling))
    expected, end = 0, 0
    while end < 16:
        rate = 1 - (end + 1) / 16
        end, expected = min(16, end + max(1, int(1 / rate**2) if rate else 16)), expected + 1
    assert got.counts[0] == expected < 16
