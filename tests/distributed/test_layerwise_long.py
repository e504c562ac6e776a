"""Tests that the layer-wise schedule equals the blocking one to the last bit over many rounds, and that a missing wait is noticed.
These tests also run on a GPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from llmtrain.parallel.collectives import PendingCollective
from tests.distributed.fake_engine import edit
from tests.distributed.real_engine import Case, Outcome, train

STEPS = {"cpu": 18, "cuda": 200}
COMPILED, RECOMPUTING = {"compile": True}, {"activation_checkpointing": True}


def case(device: str, schedule: str | dict, **parallel: object) -> Case:
    """Return a case of two replicas. On a GPU, both use the same one, with gloo between them."""
    penalty = {"z": 3.0, "temperature": 1.0, "clip": 0.5}
    sync = edit(every=3, warmup_steps=2, penalty=penalty, schedule=schedule, offload=True)
    return Case(sync, 2, 1, parallel={"precision": "fp32", **parallel}, steps=STEPS[device], device=device)


@pytest.mark.parametrize(
    ("device", "parallel"),
    [
        pytest.param("cpu", RECOMPUTING, id="recomputing"),  # test_engine.py has the compiled case
        pytest.param("cuda", RECOMPUTING, id="recomputing, on a GPU", marks=pytest.mark.gpu),
        pytest.param("cuda", COMPILED, id="compiled, on a GPU", marks=pytest.mark.gpu),
        pytest.param("cuda", COMPILED | RECOMPUTING, id="compiled and recomputing, on a GPU", marks=pytest.mark.gpu),
    ],
)
def test_layerwise_is_blocking_for_many_rounds(ranks, device, parallel):
    cases = [case(device, schedule, **parallel) for schedule in ("layerwise", "blocking")]
    layerwise, blocking = ranks.run(train, cases, world_size=2, timeout=240)[0]
    assert layerwise.rounds == blocking.rounds == -(-(STEPS[device] - 2) // 3)
    assert layerwise.losses == blocking.losses
    for name, tensor in blocking.weights.items():
        assert torch.equal(layerwise.weights[name], tensor), name


def train_without_waiting(cases: list[Case]) -> list[Outcome]:
    """Train without waiting for what replicas send of a block. All other collectives are waited for."""
    finish, kept = PendingCollective._finish, []

    def hurry(self: PendingCollective) -> None:
        kept.append(self)  # a collective in flight needs its memory
        if not self._what.startswith("synchronizing"):
            finish(self)

    with mock.patch.object(PendingCollective, "_finish", hurry):
        return train(cases)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_wait_left_out_is_seen(ranks, device):
    cases = [case(device, {"kind": "layerwise", "prefetch": 0})]
    [waiting], [hasty] = (ranks.run(run, cases, world_size=2)[0] for run in (train, train_without_waiting))
    assert hasty.losses != waiting.losses
