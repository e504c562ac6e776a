"""Tests of the engine for replicas of one device: its bits are those of FSDP2 with one rank per replica."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from llmtrain.parallel.fsdp import Fsdp2Engine
from llmtrain.parallel.single_device import SingleDeviceEngine
from llmtrain.sync.anchors import flatten
from tests.distributed.fake_engine import choices, edit
from tests.distributed.pool import RankPool
from tests.distributed.real_engine import GPT_NEO, TIED, Case, Outcome, Run, mesh_of, train

FSDP2 = mock.patch("llmtrain.parallel.build_engine.SingleDeviceEngine", Fsdp2Engine)
PENALTY = {"z": 2.0, "temperature": 1.0, "clip": 0.5}
BF16 = {"precision": "bf16"}


def of_both_engines(cases: list[Case]) -> list[tuple[Outcome, Outcome]]:
    """Return (outcome under the engine for one device, outcome under FSDP2) of each case."""
    ours = train(cases)
    with FSDP2:
        return list(zip(ours, train(cases), strict=True))


CASES = {
    "synchronous": Case(replicas=2),
    "synchronous, bf16": Case(replicas=2, parallel=BF16, model=GPT_NEO),
    "rounded gradients": Case(choices("synchronous", wire={"kind": "bf16", "gradients": True}), 2, model=TIED),
    "diloco, bf16": Case(choices("diloco", every=2, warmup_steps=2), 2, parallel=BF16),
    "layer-wise, bf16, recomputed": Case(
        edit(every=2, penalty=PENALTY), 2, parallel={**BF16, "activation_checkpointing": True}, model=TIED
    ),
    "mixed parameters": Case(choices("streaming_diloco", every=4), 2, parallel=BF16),
    "pulled parameters": Case(choices("palsgd", every=2), 2, parallel=BF16),
    "plain average": Case(choices("local_sgd", every=2), 2, parallel=BF16),
    "averaged moments": Case(choices("des_loc", every=1, moments={"first": 1, "second": 2}), 2, parallel=BF16, steps=5),
    "from between anchor and replicas": Case(
        choices("gpa", outer={"kind": "gpa", "decay": 0.8}), 2, parallel=BF16, steps=5
    ),
}


SAME_WAY = ("pulled parameters", "plain average", "from between anchor and replicas")
"""Cases in which parameters change in the same way as in another case."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.deep if name in SAME_WAY else ()) for name in CASES]
)
def test_numbers_are_those_of_fsdp2_with_one_rank(ranks: RankPool, name: str) -> None:
    for [(ours, fsdp)] in ranks.run(of_both_engines, [CASES[name]], world_size=2):
        assert (ours.losses, ours.norms, ours.rounds) == (fsdp.losses, fsdp.norms, fsdp.rounds)
        assert ours.master_dtype == torch.float32
        for weight, other in fsdp.weights.items():
            assert torch.equal(ours.weights[weight], other), weight


def continue_as(first: str, second: str, parallel: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return the losses of two steps per engine, the second from the first one's state, and those of one engine."""
    case, mesh = Case(steps=4, parallel=parallel), mesh_of(1, 1)
    alone = Run(case, mesh)
    alone.train(4)
    runs = {"single": Run(case, mesh)}
    with FSDP2:
        runs["fsdp2"] = Run(case, mesh)
    runs["other"] = Run(replace(case, optim={"lr": 1e-2}), mesh)
    before, after = runs[first], runs[second]
    before.train(2)
    state = before.engine.state_dict()
    fresh = after.engine.state_dict()
    assert {name: value.shape for name, value in fresh.items()} == {name: value.shape for name, value in state.items()}
    after.engine.load_state_dict(state)
    for ours, theirs in zip(after.engine.blocks, before.engine.blocks, strict=True):
        named = before.engine.to_dtensors(theirs, flatten(theirs))
        assert torch.equal(after.engine.from_dtensors(ours, named), flatten(ours))
    whole, other = before.engine.full_weights(), after.engine.full_weights()
    assert whole.keys() == other.keys() and all(torch.equal(other[name], weight) for name, weight in whole.items())
    after.step = 2
    after.train(4)
    return before.losses() + after.losses(), alone.losses()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("first", "second"), [("fsdp2", "single"), ("single", "fsdp2"), ("single", "other")])
def test_an_engine_continues_from_the_others_state(ranks: RankPool, first: str, second: str, precision: str) -> None:
    [(got, alone)] = ranks.run(continue_as, first, second, {"precision": precision}, world_size=1)
    assert got == alone


def weights_that_are_given_away() -> bool:
    run = Run(Case(steps=2), mesh_of(1, 1))
    assert isinstance(run.engine, SingleDeviceEngine)
    given = run.engine.full_weights()
    before = {name: weight.clone() for name, weight in given.items()}
    run.train(2)
    return all(torch.equal(given[name], weight) for name, weight in before.items())


def test_training_does_not_change_weights_that_were_given_away(ranks: RankPool) -> None:
    assert ranks.run(weights_that_are_given_away, world_size=1) == [True]
