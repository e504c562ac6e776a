"""Tests of primal averages: runs that they must equal, and the parameters at validation, rollback and end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from llmtrain.parallel.comms import Comms
from llmtrain.sync.anchors import flatten
from llmtrain.sync.build_method import build_method
from llmtrain.sync.method import Method
from tests.distributed.fake_engine import FakeEngine, Scenario, choices
from tests.distributed.threads import simulate
from tests.distributed.trace import assert_same_bits, assert_same_run


def averaged(decay: float = 0.8, share: float = 0.6, **changes: Any) -> Any:
    return choices("gpa", outer={"kind": "gpa", "decay": decay, "share": share}, **changes)


def started(sync: Any, steps: int) -> tuple[FakeEngine, Method]:
    """Return an engine and a method after `steps` steps of one replica."""
    scenario = Scenario(sync, 1, 1)
    engine = FakeEngine(scenario, 0, 0, torch.device("cpu"))
    method = build_method(sync, engine, Comms(None), Comms(None), scenario.rates, seed=0)
    for step in range(1, steps + 1):
        method.begin_step(step, 1.0)
        engine.step(step)
        method.end_step(step)
    return engine, method


@pytest.mark.parametrize("adapts", [False, True])
def test_without_an_average_it_is_its_base_optimizer(adapts: bool) -> None:
    """With a decay of 0, the average is the newest point, and so is every point between the two."""
    for share in (0.0, 0.6, 1.0):
        run = Scenario(averaged(decay=0.0, share=share), 1, 2, adapts=adapts)
        assert_same_run(
            simulate(run), simulate(Scenario(choices("local_sgd", every=1, outer="sgd"), 1, 2, adapts=adapts))
        )


def test_gradients_at_the_newest_point_alone_are_an_average_beside_the_run() -> None:
    """With share 0, the path is the base optimizer's, and the run ends with the running average of its points."""
    base = simulate(Scenario(choices("local_sgd", every=1), 1, 1, steps=12))
    got = simulate(Scenario(averaged(share=0.0), 1, 1, steps=12))
    for ours, theirs in zip(got.forwards, base.forwards, strict=True):
        for block, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(block, other, rtol=1e-12, atol=1e-12)
    path = [*base.forwards[1:], base.final]
    for index, block in enumerate(got.final):
        average = base.forwards[0][index]
        for points in path:
            average = 0.8 * average + 0.2 * points[index]
        np.testing.assert_allclose(block, average, rtol=1e-12, atol=1e-12)


def test_offload_changes_no_bit() -> None:
    assert_same_bits(simulate(Scenario(averaged(offload=True), 2, 2)), simulate(Scenario(averaged(), 2, 2)))


def test_a_step_taken_back_goes_to_where_gradients_are_computed() -> None:
    engine, method = started(averaged(), 3)
    before = [flatten(block) for block in engine.blocks]
    validated = method.validated_blocks()
    assert all((one - other).abs().max() > 1e-3 for one, other in zip(before, validated, strict=True))
    method.begin_step(4, 1.0)
    engine.step(4)
    method.roll_back()
    assert all(torch.equal(flatten(block), one) for block, one in zip(engine.blocks, before, strict=True))


def test_a_run_ends_with_what_it_validates_and_goes_on_from_there() -> None:
    engine, method = started(averaged(), 3)
    validated = [one.clone() for one in method.validated_blocks()]
    method.finish()
    assert all(torch.equal(flatten(block), one) for block, one in zip(engine.blocks, validated, strict=True))
    assert not any(momentum.any() for momentum in method.shared_state()["momentum"])
    assert all(torch.equal(one, other) for one, other in zip(method.validated_blocks(), validated, strict=True))


def test_before_the_first_local_step_the_replicas_mean_is_validated() -> None:
    _, method = started(averaged(warmup_steps=3), 2)
    assert method.validated_blocks() is None
    _, plain = started(choices("diloco", every=2), 3)
    assert plain.validated_blocks() is None
