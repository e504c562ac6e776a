"""Tests of DeepSpeed ZeRO against FSDP2: behavior of ZeRO alone, and states that either engine loads from the other.
test_pairs.py compares training under ZeRO with plain models, under every method."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import psutil
import pytest
import torch

from llmtrain.config import SyncSection
from llmtrain.sync.anchors import flatten
from llmtrain.train.validation import validate, validated_parameters
from tests.distributed.document_runs import SGD, assert_is_plain, train_on_documents
from tests.distributed.fake_engine import choices, edit
from tests.distributed.pool import RankPool
from tests.distributed.real_engine import GPT_NEO, Case, Outcome, Run, mesh_of, train, zero_pool
from tests.distributed.test_engine import BATCH

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]
STAGES = (1, 2, 3)
ONE_STAGE = (*(pytest.param(stage, marks=pytest.mark.deep) for stage in STAGES[:-1]), STAGES[-1])
"""Stage 3, which does the most. The other stages are tested in `deep`."""
FEW_STEPS = 3
"""Steps after which parameters still agree to 1e-5, in relative terms (docs/resume.md). Later, differences grow."""
THREADS_PER_GROUP = 3
ALL_VALUES = {"kind": "topk", "keep": 4096, "values": "fp32", "error_feedback": True, "feedback_decay": 0.9}
"""Wire that sends every value. What a sparser wire sends depends on how an engine divides a block among ranks."""
PENALTY = {"z": 1.0, "temperature": 0.3, "clip": 0.5}


@pytest.fixture(scope="module")
def zero_ranks() -> Iterator[RankPool]:
    pool = zero_pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    """Yield a pool of two. Ranks that have had different numbers of parameters can't share a DeepSpeed engine."""
    pool = RankPool(2)
    yield pool
    pool.close()


def on(case: Case, engine: str, **keys: Any) -> Case:
    """Return the case under another engine: `fsdp2`, `zero1`, `zero2` or `zero3`."""
    stage = {"zero_stage": int(engine[-1])} if engine.startswith("zero") else {}
    kind = "zero" if stage else engine
    return replace(case, parallel={**case.parallel, "engine": kind, **stage, **keys})


def outcomes(ranks: RankPool, cases: list[Case]) -> list[list[Outcome]]:
    """Train the cases on all ranks, and return the outcomes: [case][rank]."""
    return list(map(list, zip(*ranks.run(train, cases, timeout=200), strict=True)))


def compare(ranks: RankPool, case: Case, stages: tuple[int, ...] = STAGES, rtol: float = 1e-5, **keys: Any) -> None:
    """Check that losses, gradient norms, rounds and final weights under ZeRO are those of FSDP2, on every rank."""
    expected, *others = outcomes(ranks, [on(case, "fsdp2"), *(on(case, f"zero{stage}", **keys) for stage in stages)])
    for stage, got in zip(stages, others, strict=True):
        for ours, theirs in zip(got, expected, strict=True):
            assert_equal_runs(ours, theirs, rtol, f"stage {stage}")


def threads() -> int:
    return psutil.Process().num_threads()


def test_engines_leave_their_groups(zero_ranks: RankPool) -> None:
    """Each group has threads, which would slow down all later tests. DTensor keeps one group per mesh."""
    case = on(Case(sync=choices("diloco"), replicas=2, shard=2, steps=1), "zero3")
    zero_ranks.run(train, [case])
    before = zero_ranks.run(threads)
    for _ in range(2):
        zero_ranks.run(train, [case])
    grown = max(zero_ranks.run(threads)) - max(before)
    assert grown <= 2 * THREADS_PER_GROUP


def assert_equal_runs(got: Outcome, expected: Outcome, rtol: float, what: str) -> None:
    assert got.losses == pytest.approx(expected.losses, rel=rtol), what
    assert got.norms == pytest.approx(expected.norms, rel=20 * rtol), what
    assert got.rounds == expected.rounds, what
    assert got.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        distance = got.weights[name] - weight
        assert distance.abs().max() <= 100 * rtol if weight.numel() else True, f"{what}, {name}"
        if len(expected.losses) <= FEW_STEPS:
            assert distance.norm() <= rtol * weight.norm(), f"{what}, {name}"


@pytest.mark.deep
@pytest.mark.parametrize(
    "sync",
    [choices("synchronous"), choices("diloco", 5, warmup_steps=4), edit(5, warmup_steps=4, penalty=PENALTY)],
    ids=lambda sync: sync.method,
)
def test_thirty_steps(zero_ranks: RankPool, sync: SyncSection) -> None:
    compare(zero_ranks, Case(sync, 2, 2, steps=30, global_batch=16))


@pytest.mark.parametrize("stage", ONE_STAGE)
def test_gradients_of_padded_documents_are_those_of_a_loop_over_documents(zero_ranks: RankPool, stage: int) -> None:
    case = Case(replicas=2, shard=2, optim=SGD, steps=2, global_batch=16)
    case = on(replace(case, parallel={"precision": "fp32"}), f"zero{stage}")
    assert_is_plain([one for [one] in zero_ranks.run(train_on_documents, [case])], case, rtol=1e-5)


@pytest.mark.parametrize("clip_norm", [0.5, pytest.param(None, marks=pytest.mark.deep)])
def test_gradients_in_small_buckets_are_the_same_gradients(zero_ranks: RankPool, clip_norm: float | None) -> None:
    small = {"zero_optimization": {"reduce_bucket_size": 1000}}
    case = Case(choices("diloco", 2), 2, 2, steps=3, micro_batch=1, optim={"lr": 1e-2, "clip_norm": clip_norm})
    compare(zero_ranks, case, stages=(2, 3), deepspeed=small)


def train_around_validations(case: Case, validates: bool) -> list[list[float]]:
    """Return each step's sums of losses and tokens. With `validates`, the mean is validated within rounds."""
    run = Run(case, mesh_of(case.replicas, case.shard))
    for step in range(1, case.steps + 1):
        run.train(step)
        if validates and step > 2:
            with validated_parameters(run.engine, run.mesh):
                validate(run.engine, run.mesh, [lambda: [BATCH]])
    run.finish()
    return run.sums


@pytest.mark.parametrize("stage", ONE_STAGE)
def test_a_step_after_a_validation_computes_with_the_replicas_own_weights(zero_ranks: RankPool, stage: int) -> None:
    case = on(Case(choices("local_sgd", 100), 2, 2, steps=6), f"zero{stage}")
    plain, validated = (zero_ranks.run(train_around_validations, case, validates) for validates in (False, True))
    assert plain == validated


@pytest.mark.deep
@pytest.mark.parametrize(
    "sync",
    [choices("gpa", outer={"kind": "gpa", "decay": 0.8}), choices("sparseloco", 2, wire=ALL_VALUES)],
    ids=lambda sync: sync.method,
)
def test_methods_that_the_pairs_leave_out(zero_ranks: RankPool, sync: SyncSection) -> None:
    compare(zero_ranks, Case(sync, 2, 2, steps=5))


@pytest.mark.deep
def test_averaged_moments_are_the_same_moments(zero_ranks: RankPool) -> None:
    sync = choices("des_loc", every=1, moments={"first": 1, "second": 2})
    compare(zero_ranks, Case(sync, 2, 2, steps=4))


@pytest.mark.parametrize("prefetch", [9, pytest.param(0, marks=pytest.mark.deep)])
def test_layerwise_is_blocking_to_the_last_bit(zero_ranks: RankPool, prefetch: int) -> None:
    """A block that is gathered too early would compute with its parameters from before the synchronization."""
    schedules = ["blocking", {"kind": "layerwise", "prefetch": prefetch}]
    cases = [on(Case(edit(2, penalty=PENALTY, schedule=kind), 2, 2, steps=4), "zero3") for kind in schedules]
    blocking, layerwise = outcomes(zero_ranks, cases)
    assert layerwise[0].losses == blocking[0].losses
    assert all(torch.equal(layerwise[0].weights[name], weight) for name, weight in blocking[0].weights.items())


def continue_with(first: str, second: str) -> tuple[list[float], list[float]]:
    """Return the losses of two steps under one engine and two under another that loads its state, and those of one
    engine alone. The second engine must also convert the first one's `to_dtensors` of an anchor to its own layout."""
    case, mesh = Case(replicas=1, shard=2, steps=4), mesh_of(1, 2)
    alone = Run(case, mesh)
    alone.train(4)
    before, after = (Run(on(case, kind), mesh) for kind in (first, second))
    before.train(2)
    giving, taking = before.engine, after.engine
    state = giving.state_dict()
    assert taking.state_dict().keys() == state.keys()  # the names that are read from a checkpoint
    taking.load_state_dict(state)
    for ours, theirs in zip(taking.blocks, giving.blocks, strict=True):
        named = giving.to_dtensors(theirs, flatten(theirs))
        assert torch.equal(taking.from_dtensors(ours, named), flatten(ours))
    whole, other = giving.full_weights(), taking.full_weights()
    assert all(torch.equal(other[name], weight) for name, weight in whole.items())
    after.step = 2
    after.train(4)
    return before.losses() + after.losses(), alone.losses()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("fsdp2", "zero3"),
        ("zero3", "fsdp2"),
        *(
            pytest.param(*engines, marks=pytest.mark.deep)
            for engines in (("zero1", "zero3"), ("fsdp2", "zero2"), ("zero2", "fsdp2"))
        ),
    ],
)
def test_an_engine_continues_from_the_others_state(two_ranks: RankPool, first: str, second: str) -> None:
    for got, alone in two_ranks.run(continue_with, first, second, timeout=100):
        assert got == pytest.approx(alone, rel=1e-5)


ODD = GPT_NEO.model_copy(
    update={"config": {**GPT_NEO.config, "hidden_size": 15, "num_heads": 1, "intermediate_size": 21}}
)


def squared_norms(stage: int) -> tuple[float, float]:
    """Return the squared norms of this rank's master weights and of the full weights that this rank has, after two
    steps in memory that was filled with NaN."""
    torch.use_deterministic_algorithms(True)  # this also fills uninitialized memory
    try:
        run = Run(on(Case(model=ODD, replicas=1, shard=2, steps=2), f"zero{stage}"), mesh_of(1, 2))
        run.train(2)
    finally:
        torch.use_deterministic_algorithms(False)
    mine = sum(float(shard.double().square().sum()) for block in run.engine.blocks for shard in block.shards)
    return mine, sum(float(weight.double().square().sum()) for weight in run.engine.full_weights().values())


@pytest.mark.parametrize("stage", [1, 3])
def test_what_fills_up_a_ranks_part_is_no_part_of_a_norm(two_ranks: RankPool, stage: int) -> None:
    parts = two_ranks.run(squared_norms, stage)
    assert sum(mine for mine, _ in parts) == pytest.approx(parts[0][1], rel=1e-12)
