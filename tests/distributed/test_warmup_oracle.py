"""Tests of methods that are synchronous until the learning rate has fallen, against the float64 oracle."""

from __future__ import annotations

import pytest

from llmtrain.config import LRScheduleSection
from tests.distributed.fake_engine import Scenario, choices
from tests.distributed.test_methods_oracle import CONSTANT, DROPS, FALLING, SHARDED, matches_the_oracle

WSD = LRScheduleSection(kind="wsd", warmup_steps=2, decay_fraction=0.5)
WARMUPS = {
    "falls-at-once": (DROPS, {"warmup_until_lr": 0.5}, 6),
    "later-drop": (DROPS, {"warmup_until_lr": 0.2}, 14),
    "smooth": (FALLING, {"warmup_until_lr": 0.5}, 11),
    "at-the-end": (WSD, {"warmup_until_lr": 0.5}, 15),
    "longer-by-steps": (DROPS, {"warmup_until_lr": 0.5, "warmup_steps": 9}, 9),
    "longer-by-lr": (DROPS, {"warmup_until_lr": 0.5, "warmup_steps": 3}, 6),
    "never-falls": (CONSTANT, {"warmup_until_lr": 0.5}, 20),
}


@pytest.mark.parametrize(("replicas", "shard"), SHARDED)
@pytest.mark.parametrize(("schedule", "changes", "last"), WARMUPS.values(), ids=WARMUPS.keys())
def test_synchronous_until_the_learning_rate_falls(
    schedule: LRScheduleSection, changes: dict, last: int, replicas: int, shard: int
) -> None:
    """A low learning rate in the schedule's own warm-up does not count as fallen."""
    syncs = [choices("post_local_sgd", every=3, **changes), choices("co2", every=3, **changes)]
    for got in matches_the_oracle(*(Scenario(sync, replicas, shard, steps=20, schedule=schedule) for sync in syncs)):
        assert got.synchronous_steps == list(range(1, last + 1))
