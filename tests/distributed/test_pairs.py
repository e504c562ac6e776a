"""Tests of combined choices on real engines.

Losses, gradient norms and weights are those of plain models, trained in float64, one replica after another. Replicas
end equal. A run that continues from a checkpoint is the run that never stopped. Outside `deep`, there is a case for
each level of each choice, and for each engine with each level of the choices that engines see. In `deep`, every two
choices meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.distributed.pairs import FACTORS, RESUMED, ROWS, WARMUP, case_of, is_refused, resumed_after
from tests.distributed.pairs_reference import Reference, reference
from tests.distributed.pairs_runs import train, train_and_resume
from tests.distributed.pool import RankPool
from tests.distributed.real_engine import Case, Outcome, zero_pool

TOLERANCES = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 2e-3}
"""Relative tolerances of losses, by precision."""
SINGLE = 1e-8
"""Least tolerance behind that of weights. Llama's norms are computed in fp32 in every precision, and AdamW amplifies
the rounding errors that they cause in small gradients."""
HALFWAY = 0.5
"""Largest distance of final weights from the expected ones, as a share of the expected distance from the initial
weights. For coarse wires and bf16, the tolerance of weights is wider than that distance."""
ROUNDED = {"fp32": 0.0, "bf16": 2e-4, "int8": 2e-4, "int4": 2e-3}
"""Tolerances that are added for the wire format, from the first rounded message on."""


def row_id(row: Mapping[str, str]) -> str:
    return " ".join(row.values())


def every_product() -> list[dict[str, str]]:
    """Return rows with every method on every mesh under every engine, and rows of EDiT with each other level of six
    more choices under every engine."""
    plain = {name: levels[0] for name, levels in FACTORS.items()} | {"schedule": "layerwise"}
    own = {"synchronous": "blocking", "co2": "delayed", "streaming_diloco": "overlapped", "wagma": "wait_avoiding"}
    methods = ("method", "mesh", "engine")
    rows = [
        {**plain, **dict(zip(methods, levels, strict=True)), "schedule": own.get(levels[0], "layerwise")}
        for levels in product(*(FACTORS[name] for name in methods))
    ]
    rows += [
        {**plain, "method": "edit", "engine": engine, name: level}
        for engine in FACTORS["engine"]
        for name in ("wire", "model", "precision", "recomputed", "offload", "optimizer")
        for level in FACTORS[name][1:]
    ]
    return rows


PRODUCT = [row for row in every_product() if row not in ROWS]


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    """Yield pools by size, for these tests alone: DeepSpeed has global state, such as a count of parameters."""
    pools = {size: (zero_pool if find_spec("deepspeed") else RankPool)(size) for size in (3, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize(
    "row",
    [*RESUMED, *(pytest.param(row, marks=pytest.mark.deep) for row in [*ROWS, *PRODUCT] if row not in RESUMED)],
    ids=row_id,
)
def test_a_run_is_that_of_plain_replicas_and_goes_on_from_a_checkpoint(
    pools: dict[int, RankPool], tmp_path: Path, row: dict[str, str]
) -> None:
    if is_refused(row):
        pytest.skip("recipes with this combination are refused")
    if row["engine"] != "fsdp2" and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    case = case_of(row)
    pool = pools[case.replicas * case.shard]
    is_resumed = row not in ROWS or row in RESUMED
    part = (train_and_resume, case, resumed_after(row), tmp_path) if is_resumed else (train, case)
    ranks = pool.run(*part)
    for whole, _ in ranks:
        assert whole.losses == ranks[0][0].losses
    assert_replicas_are_equal(case, [whole for whole, _ in ranks])
    if row["schedule"] == "wait_avoiding" and case.replicas > 1:  # its groups depend on when replicas arrive
        assert ranks[0][0].losses[-1] < ranks[0][0].losses[0]
        assert_replicas_are_equal(case, [resumed or whole for whole, resumed in ranks])
        return
    for whole, resumed in ranks:
        if resumed is not None:
            assert_same_bits(resumed, whole)
    assert_is_that_of(reference(case), case, row, [whole for whole, _ in ranks])


def assert_replicas_are_equal(case: Case, ranks: list[Outcome]) -> None:
    for rank, outcome in enumerate(ranks):
        for name, tensor in outcome.weights.items():
            assert torch.equal(tensor, ranks[rank % case.shard].weights[name]), (rank, name)


def assert_same_bits(got: Outcome, expected: Outcome) -> None:
    assert got.losses == expected.losses and got.norms == expected.norms and got.rounds == expected.rounds
    for name, tensor in expected.weights.items():
        assert torch.equal(tensor, got.weights[name]), name


def assert_is_that_of(expected: Reference, case: Case, row: Mapping[str, str], ranks: list[Outcome]) -> None:
    """Check a run against the reference, up to rounding. The tolerances of norms and weights are 20 and 100 times as
    wide as those of losses, as where test_zero.py compares engines."""
    exact = TOLERANCES[row["precision"]]
    loose = exact + (ROUNDED[row["wire"]] if case.replicas > 1 else 0.0)
    before = 1 if row["method"] == "synchronous" else WARMUP + 1  # forward passes before a rounded message is used
    np.testing.assert_allclose(ranks[0].losses[:before], expected.losses[:before], rtol=exact)
    np.testing.assert_allclose(ranks[0].losses, expected.losses, rtol=loose)
    for rank, outcome in enumerate(ranks):
        np.testing.assert_allclose(outcome.norms, expected.norms[rank // case.shard], rtol=20 * loose)
        assert outcome.rounds == expected.rounds
        assert outcome.master_dtype == (torch.float64 if row["precision"] == "fp64" else torch.float32)
    for name, whole in expected.weights.items():
        there = torch.cat([rank.weights[name] for rank in ranks[: case.shard]])
        distance = there - whole
        assert distance.abs().max() <= 100 * max(loose, SINGLE), name
        assert distance.norm() <= HALFWAY * expected.moved[name], (
            f"{name}: the initial weights are hardly farther from the expected ones"
        )
