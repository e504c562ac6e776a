"""Tests of DES-LOC: averages of the inner optimizer's moments, under every schedule, against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llmtrain.config import LRScheduleSection
from tests.distributed.fake_engine import Scenario, choices, replay
from tests.distributed.pairs_reference import assert_is_reference
from tests.distributed.pool import RankPool
from tests.distributed.real_engine import GPT_NEO, Case, train
from tests.distributed.threads import simulate
from tests.distributed.trace import assert_same_run

FALLING = LRScheduleSection(kind="cosine", warmup_steps=2, final_ratio=0.1)
SECONDS = {"kind": "seconds", "every": 3.0, "min_steps": 0}
SOON = {"first": 1, "second": 2}
SYNCS = {
    "blocking": choices("des_loc", every=2),
    "layerwise": choices("des_loc", every=2, schedule="layerwise", moments=SOON, warmup_steps=3),
    "first-alone": choices("des_loc", every=3, moments={"first": 2, "second": None}),
    "second-alone": choices("des_loc", every=3, moments={"first": None, "second": 1}),
    "overlapped": choices(
        "streaming_diloco",
        every=4,
        wire="fp32",
        schedule={"kind": "overlapped", "steps": 2, "fragments": 2},
        moments=SOON,
    ),
    "delayed": choices("co2", every=3, moments=SOON),
    "qsr": choices("qsr", period={"kind": "qsr", "base": 2, "alpha": 1.5}, moments=SOON),
    "of-seconds": choices("diloco", period=SECONDS, moments=SOON),
}
MESHES = [pytest.param(2, 2, id="2x2"), pytest.param(4, 1, id="4x1", marks=pytest.mark.deep)]


def scenario(sync: Any, replicas: int = 2, shard: int = 2, **run: Any) -> Scenario:
    speeds = {"step_seconds": (0.5, 1.25, 1.0, 0.75)[:replicas]} if sync.period.is_timed else {}
    return Scenario(sync, replicas, shard, **{"steps": 17, "schedule": FALLING, "adapts": True, **speeds, **run})


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
@pytest.mark.parametrize("sync", SYNCS.values(), ids=SYNCS.keys())
def test_the_oracle_finds_the_same(sync: Any, replicas: int, shard: int) -> None:
    run = scenario(sync, replicas, shard)
    got = simulate(run)
    assert_same_run(got, replay(run))
    alone = replace(run, sync=sync.model_copy(update={"moments": None}))
    with pytest.raises(AssertionError):
        assert_same_run(got, replay(alone))


@pytest.mark.parametrize("second", [3, None])
def test_what_a_replica_has_never_moved_has_no_first_moment_of_others(second: int | None) -> None:
    """A first moment stays 0 while the second one is 0, as in the row of a token that a replica has not read."""
    still = {(step, 1, block): 0.0 for step in range(1, 18) for block in (0, 2)}
    sync = choices("des_loc", every=2, moments={"first": 1, "second": second})
    run = scenario(sync, schedule=LRScheduleSection(kind="constant"), scales=still, pull=0.0)
    got = simulate(run)
    assert_same_run(got, replay(run))


def test_averages_of_everything_after_every_step_are_synchronous_while_the_optimizer_is_linear() -> None:
    """An optimizer with second moments is not linear: the mean of squares is not the square of the mean. So only the
    run of one replica, which has nothing to average, has moments."""
    sync = choices("des_loc", every=1, moments={"first": 1, "second": 1})
    for replicas, adapts in ((1, True), (4, False)):
        run = scenario(sync, replicas, 1, adapts=adapts)
        together = replay(replace(run, sync=choices("synchronous")))
        for got, expected in zip(simulate(run).final, together.final, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-13)


def test_moments_are_sent_as_often_as_they_are_due() -> None:
    """A replica sends 2 (N-1)/N of the moments per average: in 6 rounds, first ones twice and second ones once."""
    runs = [
        scenario(choices("des_loc", every=2, moments=each), 4, 1, steps=12)
        for each in (None, {"first": 3, "second": 6})
    ]
    plain, averaged = (simulate(run).bytes_sent for run in runs)
    values = sum(runs[0].size(block) for block in range(len(runs[0].shapes)))
    compared = 2 * 2 * 4 * 3 * 8 * len(runs[0].shapes)  # to compare which moments replicas have, in two rounds
    assert averaged - plain == 3 * 4 * 2 * 3 / 4 * 8 * values + compared


def test_moments_of_an_engines_adamw_are_averaged(ranks: RankPool) -> None:
    """test_muon.py has such a case with Muon. Most tokens of the vocabulary do not occur."""
    sync, optim = choices("des_loc", every=1, moments={"first": 2, "second": 3}), {"lr": 1e-2, "eps": 1e-5}
    case = Case(sync, 2, 2, GPT_NEO, {"precision": "fp64"}, optim)
    assert_is_reference([found for [found] in ranks.run(train, [case])], case)
