"""Tests of Muon as inner optimizer: against torch's, against a float64 oracle, and sharded against unsharded."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from llmtrain.config import MuonSection
from llmtrain.parallel import muon
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.muon import Muon, ShardedMatrix, orthogonalization_flops, orthogonalize
from tests.distributed.fake_engine import choices, edit
from tests.distributed.pairs_reference import assert_is_reference, orthogonal_of
from tests.distributed.pool import RankPool
from tests.distributed.real_engine import GPT_NEO, TIED, Case, Outcome, Run, mesh_of, train

SHAPES = [(5, 3), (8, 8), (1, 6), (7, 12), (8, 8), (2, 2), (12, 7)]
"""Shapes, some with fewer rows than there are ranks, or a number of rows that no number of ranks divides."""
STEPS, LR, DECAY = 4, 0.02, 0.1


def matrices_of(seed: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=drawn) for shape in SHAPES]


def whole_run(section: MuonSection, dtype: torch.dtype, absent: int | None = None) -> list[torch.Tensor]:
    """Return the matrices after STEPS steps on one rank. Matrix number `absent` has no gradient."""
    matrices = [torch.nn.Parameter(matrix.to(dtype)) for matrix in matrices_of(0)]
    optimizer = Muon([ShardedMatrix(m, m.shape) for m in matrices], LR, DECAY, section, Comms(None))
    return stepped(optimizer, matrices, [slice(None)] * len(matrices), absent)


def sharded_run(section: MuonSection, dtype: torch.dtype, absent: int | None = None) -> list[torch.Tensor]:
    """Return this rank's rows of the matrices after the same steps, sharded over all ranks."""
    comms = Comms(dist.group.WORLD, axis="shard")
    rows = []
    for rows_of_all, _ in SHAPES:
        each = -(-rows_of_all // comms.size)
        rows.append(slice(comms.rank * each, (comms.rank + 1) * each))
    own = [torch.nn.Parameter(m[part].to(dtype)) for m, part in zip(matrices_of(0), rows, strict=True)]
    sharded = [ShardedMatrix(part, torch.Size(shape)) for part, shape in zip(own, SHAPES, strict=True)]
    return stepped(Muon(sharded, LR, DECAY, section, comms), own, rows, absent)


def stepped(optimizer: Any, parameters: list[Any], rows: list[slice], absent: int | None) -> list[torch.Tensor]:
    for step in range(1, STEPS + 1):
        for number, (parameter, gradient) in enumerate(zip(parameters, matrices_of(step), strict=True)):
            parameter.grad = None if number == absent else gradient[rows[number]].to(parameter.dtype)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original"])
def test_on_one_rank_it_is_torchs(adjust_lr: str) -> None:
    section = MuonSection(adjust_lr=adjust_lr, momentum=0.9, precision="bf16")
    matrices = [torch.nn.Parameter(matrix) for matrix in matrices_of(0)]
    torchs = torch.optim.Muon(matrices, LR, DECAY, momentum=0.9, adjust_lr_fn=adjust_lr)
    expected = stepped(torchs, matrices, [slice(None)] * len(matrices), None)
    for ours, other in zip(whole_run(section, torch.float32), expected, strict=True):
        assert torch.equal(ours, other)


@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original"])
def test_steps_are_those_of_a_float64_oracle(adjust_lr: str) -> None:
    section = MuonSection(adjust_lr=adjust_lr, momentum=0.9, iterations=4)
    expected = [matrix.double().numpy() for matrix in matrices_of(0)]
    momenta = [np.zeros(shape) for shape in SHAPES]
    for step in range(1, STEPS + 1):
        for number, gradient in enumerate(matrices_of(step)):
            rows, columns = SHAPES[number]
            momenta[number] = 0.9 * momenta[number] + 0.1 * gradient.double().numpy()
            update = orthogonal_of(0.9 * momenta[number] + 0.1 * gradient.double().numpy(), 4)
            factor = (
                0.2 * max(rows, columns) ** 0.5 if adjust_lr == "match_rms_adamw" else max(1, rows / columns) ** 0.5
            )
            expected[number] = (1 - LR * DECAY) * expected[number] - LR * factor * update
    for ours, other in zip(whole_run(section, torch.float64), expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("rows", "columns"), [(20, 7), (7, 20), (9, 9), (1, 5)])
def test_singular_values_come_near_1_and_vectors_stay(rows: int, columns: int) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalize(matrix.clone(), 5)
    rotated = left.T @ found @ right.T
    assert torch.allclose(rotated, torch.diag(rotated.diagonal()), atol=1e-12)
    assert (rotated.diagonal()[values > 0.05 * values.norm()] - 1).abs().max() < 0.35


def test_a_matrix_of_zeros_stays_zero() -> None:
    assert not orthogonalize(torch.zeros(3, 4), 5).any()


@pytest.mark.parametrize(("world", "precision"), [(2, "bf16"), (3, "fp32"), (4, "fp32")])
def test_sharded_by_rows_it_is_the_same_to_the_last_bit(ranks: RankPool, world: int, precision: str) -> None:
    """The same holds if a matrix has no gradient."""
    section, dtype = MuonSection(precision=precision), torch.float64 if world == 3 else torch.float32
    for absent in (None, 3):
        found = ranks.run(sharded_run, section, dtype, absent, world_size=world)
        for number, expected in enumerate(whole_run(section, dtype, absent)):
            assert torch.equal(torch.cat([of_rank[number] for of_rank in found]), expected), SHAPES[number]


def traffic_of_one_step() -> float:
    comms = Comms(dist.group.WORLD, axis="shard")
    rows = torch.nn.Parameter(torch.ones(2, 6))
    optimizer = Muon(
        [ShardedMatrix(rows, torch.Size((2 * comms.size, 6)))], LR, DECAY, MuonSection(precision="bf16"), comms
    )
    rows.grad = torch.ones_like(rows)
    optimizer.step()
    return comms.traffic.bytes


def test_rows_travel_in_bf16_to_the_rank_that_works_and_back(ranks: RankPool) -> None:
    values = 2 * 6
    assert ranks.run(traffic_of_one_step) == [3 * 2 * values, 2 * values, 2 * values, 2 * values]


EXACT = {"precision": "fp64"}
OPTIM = {"kind": "muon", "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-5}
"""Options of the inner optimizer. Epsilon is large, because AdamW amplifies the rounding errors that Llama's norms,
which are in fp32, cause in small gradients."""
CASES = {
    "synchronous": Case(replicas=2, shard=2, parallel=EXACT),
    "original lr": Case(
        shard=2, model=TIED, parallel=EXACT, optim={"muon": {"adjust_lr": "original", "adamw_lr_ratio": 0.3}}
    ),
    "diloco": Case(
        choices("diloco", every=2), 2, 2, GPT_NEO, EXACT, optim={"muon": {"momentum": 0.8, "iterations": 3}}
    ),
    "edit": Case(edit(every=2, penalty={"z": 2.0, "temperature": 1.0, "clip": 0.5}), 4, 1, parallel=EXACT),
    "streaming_diloco": Case(
        choices("streaming_diloco", every=4, schedule={"kind": "overlapped", "steps": 1}, wire="fp32"),
        2,
        2,
        parallel=EXACT,
    ),
    "des_loc": Case(choices("des_loc", every=1, moments={"first": 2, "second": 3}), 2, 2, GPT_NEO, EXACT),
}
CASES = {name: replace(case, optim={**OPTIM, **case.optim}) for name, case in CASES.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.deep if n == "streaming_diloco" else ()) for n in CASES]
)
def test_training_is_that_of_the_oracle(ranks: RankPool, name: str) -> None:
    """Runs agree up to rounding errors of Llama's norms, which are in fp32 in every precision."""
    case = CASES[name]
    found: list[Outcome] = [of_rank for (of_rank,) in ranks.run(train, [case], world_size=case.replicas * case.shard)]
    assert_is_reference(found, case)


def count_of_shapes(case: Case) -> tuple[Counter, dict[str, torch.Tensor], float]:
    """Return (number of matrices by shape that this rank orthogonalizes in a case, shapes of the optimizer's state by
    name, bytes that this rank sends to other replicas)."""
    shapes: Counter = Counter()

    def counted(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
        shapes[tuple(matrix.shape)] += 1
        return orthogonalize(matrix, iterations)

    run = Run(case, mesh_of(case.replicas, case.shard))
    with mock.patch.object(muon, "orthogonalize", counted):
        run.train(case.steps)
    state = {name: value.to("cpu") for name, value in run.engine.state_dict().items() if name.startswith("optimizer")}
    return (
        shapes,
        {name: torch.tensor(value.shape) for name, value in state.items()},
        run.mesh.replica_comms.traffic.bytes,
    )


@pytest.mark.parametrize(("replicas", "shard"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.deep)])
def test_every_matrix_of_a_layer_is_orthogonalized_once_per_step(ranks: RankPool, replicas: int, shard: int) -> None:
    """One rank of each replica does so, and replicas send each other nothing more."""
    case = Case(replicas=replicas, shard=shard, steps=2, optim=OPTIM)
    found = ranks.run(count_of_shapes, case, world_size=replicas * shard)
    # 2 layers: queries, keys, values, outputs; gate and up; down.
    expected = {(16, 16): 2 * 2 * 4, (24, 16): 2 * 2 * 2, (16, 24): 2 * 2}
    for first in range(0, replicas * shard, shard):
        assert sum((shapes for shapes, *_ in found[first : first + shard]), Counter()) == expected
    kept = {name.removeprefix("optimizer.causal_lm.") for name in found[0][1]}
    assert "model.layers.1.mlp.down_proj.weight.momentum_buffer" in kept
    assert {"lm_head.weight.exp_avg", "model.embed_tokens.weight.exp_avg", "model.norm.weight.exp_avg_sq"} < kept
    assert not any("proj.weight.exp" in name or "norm.weight.momentum" in name for name in kept)
    plain = ranks.run(count_of_shapes, replace(case, optim={"lr": 1e-2}), world_size=replicas * shard)
    assert not any(shapes for shapes, *_ in plain)
    assert [sent for *_, sent in found] == [sent for *_, sent in plain]


def continued(case: Case, shard: int) -> tuple[list[float], list[float]]:
    """Return the losses of the last two of four steps, without and with a reload of the state before them."""
    mesh = mesh_of(1, shard)
    alone = Run(replace(case, shard=shard), mesh)
    alone.train(2)
    state = {name: value.clone() for name, value in alone.engine.state_dict().items()}
    alone.train(4)
    after = Run(replace(case, shard=shard), mesh)
    after.engine.load_state_dict(state)
    after.step = 2
    after.train(4)
    return alone.losses()[2:], after.losses()


@pytest.mark.parametrize("shard", [1, 2])
def test_a_run_is_resumed_exactly(ranks: RankPool, shard: int) -> None:
    for alone, after in ranks.run(
        continued, Case(steps=4, optim=OPTIM, parallel={"precision": "bf16"}), shard, world_size=shard
    ):
        assert alone == after


def test_flops_are_those_of_the_products() -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(6, 10), 4)
    assert counter.get_total_flops() == orthogonalization_flops(6, 10, 4) == orthogonalization_flops(10, 6, 4)
