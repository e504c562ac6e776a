"""DeepSpeed ZeRO against FSDP2: the same losses, under every method, and states that either engine takes from the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from llmtrain.config import OptimSection, ParallelSection, SyncSection
from llmtrain.model import build, model_config
from llmtrain.parallel.build import build_engine
from llmtrain.sync.anchors import flatten
from llmtrain.sync.methods import METHODS
from tests.distributed.fake_engine import choices, edit
from tests.distributed.pool import RankPool
from tests.distributed.real_engine import GPT_NEO, LLAMA, VOCABULARY, Case, Outcome, mesh_of, micro_batches, train

pytest.importorskip("deepspeed")

STAGES = (1, 2, 3)
TIED = LLAMA.model_copy(update={"config": {**LLAMA.config, "tie_word_embeddings": True}})
PENALTY = {"z": 1.0, "temperature": 0.3, "clip": 0.5}


@pytest.fixture(scope="module")
def zero_ranks() -> Iterator[RankPool]:
    """Ranks of their own: DeepSpeed keeps much that is global."""
    pool = RankPool(4)
    yield pool
    pool.close()


def on(case: Case, engine: str, **keys: Any) -> Case:
    """The case under another engine: `fsdp2`, `zero1`, `zero2` or `zero3`."""
    stage = {"zero_stage": int(engine[-1])} if engine.startswith("zero") else {}
    kind = "zero" if stage else engine
    return replace(case, parallel={**case.parallel, "engine": kind, **stage, **keys})


def outcomes(ranks: RankPool, cases: list[Case]) -> list[list[Outcome]]:
    """[case][rank]."""
    return list(map(list, zip(*ranks.run(train, cases, timeout=200), strict=True)))


def compare(ranks: RankPool, case: Case, stages: tuple[int, ...] = STAGES, rtol: float = 1e-5, **keys: Any) -> None:
    """Losses, gradient norms, rounds and final weights of ZeRO are FSDP2's, on every rank."""
    expected, *others = outcomes(ranks, [on(case, "fsdp2"), *(on(case, f"zero{stage}", **keys) for stage in stages)])
    for stage, got in zip(stages, others, strict=True):
        for ours, theirs in zip(got, expected, strict=True):
            assert_equal_runs(ours, theirs, rtol, f"stage {stage}")


def assert_equal_runs(got: Outcome, expected: Outcome, rtol: float, what: str) -> None:
    assert got.losses == pytest.approx(expected.losses, rel=rtol), what
    assert got.norms == pytest.approx(expected.norms, rel=20 * rtol), what
    assert got.rounds == expected.rounds, what
    assert got.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        assert (got.weights[name] - weight).abs().max() <= 100 * rtol if weight.numel() else True, f"{what}, {name}"


@pytest.mark.parametrize(
    "sync",
    [choices("synchronous"), choices("diloco", 5, warmup_steps=4), edit(5, warmup_steps=4, penalty=PENALTY)],
    ids=lambda sync: sync.method,
)
def test_thirty_steps(zero_ranks: RankPool, sync: SyncSection) -> None:
    compare(zero_ranks, Case(sync, 2, 2, steps=30, global_batch=16))


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"wagma"}))
def test_every_method(zero_ranks: RankPool, method: str) -> None:
    rounds = {
        "qsr": {"period": {"kind": "qsr", "base": 2, "alpha": 1e-9}},
        "a_edit": {"period": {"kind": "seconds", "every": 2, "min_steps": 1}},
        "post_local_sgd": {"every": 2, "warmup_until_lr": None},
        "streaming_diloco": {"every": 2, "schedule": {"kind": "overlapped", "steps": 1, "fragments": 2, "mix": 0.5}},
        "synchronous": {},
    }.get(method, {"every": 2})
    warmup = {} if method == "synchronous" else {"warmup_steps": 2}
    # Rounded messages fall to one side or the other for the last bit of a sum.
    wire = {"wire": "fp32"}
    compare(zero_ranks, Case(choices(method, **rounds, **warmup, **wire), 2, 2, steps=8), stages=(2, 3))


@pytest.mark.parametrize("stage", STAGES)
def test_wagma_whose_groups_are_a_matter_of_time(zero_ranks: RankPool, stage: int) -> None:
    case = on(Case(choices("wagma", 4), 4, 1, steps=8), f"zero{stage}")
    [ranks] = outcomes(zero_ranks, [case])
    assert ranks[0].losses[-1] < ranks[0].losses[0] - 0.3
    for rank in ranks:
        assert all(torch.equal(rank.weights[name], weight) for name, weight in ranks[0].weights.items())


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"model": GPT_NEO}, {}),
        ({"model": TIED}, {}),
        ({"micro_batch": 1, "global_batch": 16}, {}),
        ({"optim": {"lr": 1e-2, "clip_norm": 0.5}}, {}),
        ({"optim": {"lr": 0.3, "kind": "sgd", "clip_norm": None}}, {}),
        ({}, {"activation_checkpointing": True}),
        ({}, {"zero_offload": True}),
        ({}, {"deepspeed": {"zero_optimization": {"reduce_bucket_size": 1000}}}),
    ],
    ids=["gpt_neo", "tied", "accumulation", "clipping", "sgd", "recomputed", "offloaded", "small buckets"],
)
def test_whatever_the_recipe_says(zero_ranks: RankPool, changes: dict, keys: dict) -> None:
    sync = edit(2, warmup_steps=2, penalty=PENALTY, schedule="layerwise")
    compare(zero_ranks, Case(sync, 2, 2, steps=6, **changes), **keys)


@pytest.mark.parametrize("mesh", [(4, 1), (1, 4)], ids=str)
def test_every_mesh(zero_ranks: RankPool, mesh: tuple[int, int]) -> None:
    compare(zero_ranks, Case(choices("diloco", 2, warmup_steps=2), *mesh, steps=6))


def test_bf16_computes_in_bf16_and_keeps_fp32_masters(zero_ranks: RankPool) -> None:
    case = Case(edit(2, warmup_steps=2), 2, 2, steps=6, parallel={"precision": "bf16"})
    expected, *others = outcomes(zero_ranks, [on(case, "fsdp2"), *(on(case, f"zero{stage}") for stage in STAGES)])
    for got in others:
        assert got[0].master_dtype == torch.float32
        assert got[0].losses == pytest.approx(expected[0].losses, rel=2e-3)


def test_layerwise_is_blocking_to_the_last_bit(zero_ranks: RankPool) -> None:
    """A block that were gathered before its turn would be computed with as it was before."""
    schedules = ["blocking", {"kind": "layerwise", "prefetch": 0}, {"kind": "layerwise", "prefetch": 9}]
    cases = [on(Case(edit(2, penalty=PENALTY, schedule=kind), 2, 2, steps=7), "zero3") for kind in schedules]
    blocking, *layerwise = outcomes(zero_ranks, cases)
    for other in layerwise:
        assert other[0].losses == blocking[0].losses
        assert all(torch.equal(other[0].weights[name], weight) for name, weight in blocking[0].weights.items())


def _continue_with(first: str, second: str) -> tuple[list[float], list[float]]:
    """Losses of three steps by one engine and three by another that takes over its state, and those of one alone. With
    what `as_sharded` makes of an anchor, the other must make its own layout of it."""
    case, mesh = Case(replicas=1, shard=4, steps=6), mesh_of(1, 4)

    def engine_of(kind: str) -> Any:
        parallel = ParallelSection(**on(case, kind).parallel)
        model = build(model_config(case.model, VOCABULARY), loss_chunk=11)
        return build_engine(model, mesh, parallel, OptimSection(**case.optim), seed=3)

    def losses(engine: Any, steps: range) -> list[float]:
        seen = []
        for step in steps:
            loss = engine.forward_backward(micro_batches(case, mesh, step))
            engine.step(1e-2)
            seen.append(float(mesh.everyone.all_reduce(loss).wait()))
        return seen

    alone = losses(engine_of("fsdp2"), range(1, 7))
    giving, taking = engine_of(first), engine_of(second)
    before = losses(giving, range(1, 4))
    state = giving.state_dict()
    assert taking.state_dict().keys() == state.keys()  # what a checkpoint is asked for
    taking.load_state_dict(state)
    for ours, theirs in zip(taking.blocks, giving.blocks, strict=True):
        named = giving.as_sharded(theirs, flatten(theirs))
        assert torch.equal(taking.from_sharded(ours, named), flatten(ours))
    whole, other = giving.full_weights(), taking.full_weights()
    assert all(torch.equal(other[name], weight) for name, weight in whole.items())
    return before + losses(taking, range(4, 7)), alone


@pytest.mark.parametrize(
    ("first", "second"),
    [("fsdp2", "zero3"), ("zero3", "fsdp2"), ("zero1", "zero3"), ("fsdp2", "zero2"), ("zero2", "fsdp2")],
)
def test_an_engine_continues_from_the_others_state(zero_ranks: RankPool, first: str, second: str) -> None:
    for got, alone in zero_ranks.run(_continue_with, first, second, timeout=100):
        assert got == pytest.approx(alone, rel=1e-5)
