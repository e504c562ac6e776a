"""Tests of the wire format of the largest values: the values sent, their bytes and sums, and methods with it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from llmtrain.parallel.comms import Comms
from llmtrain.parallel.sparse_format import CHUNK, SparseFormat
from tests.distributed.fake_engine import Scenario, choices, edit, replay
from tests.distributed.oracle_wire import largest
from tests.distributed.pool import RankPool
from tests.distributed.threads import on_each, simulate
from tests.distributed.trace import assert_same_bits, assert_same_run

SIZES = (1, 2, 63, 4095, 4096, 4097, 3 * 4096 + 1000)


def values_of(size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64).to(dtype)


def sent(values: torch.Tensor, keep: int, kind: str) -> torch.Tensor:
    wire = SparseFormat(keep, kind)
    encoded = wire.encode(values)
    assert encoded.dtype == torch.uint8 and len(encoded) == wire.size(len(values), values.element_size())
    total = torch.zeros_like(values)
    wire.add_decoded(encoded, total)
    return total


@pytest.mark.parametrize("kind", ["2bit", "fp32"])
@pytest.mark.parametrize("keep", [1, 63, 64, 4096])
def test_the_largest_values_of_each_chunk_are_sent(keep: int, kind: str) -> None:
    """A shorter last chunk sends its share."""
    for size in SIZES:
        values = values_of(size)
        np.testing.assert_allclose(sent(values, keep, kind), largest(values.numpy(), keep, kind), rtol=1e-6)


def test_all_values_unrounded_are_the_message() -> None:
    for dtype in (torch.float64, torch.float32):
        for size in SIZES:
            assert torch.equal(sent(values_of(size, dtype), CHUNK, "fp32"), values_of(size, dtype))


def test_bytes_are_those_that_are_published_and_two_magnitudes_per_chunk() -> None:
    """A chunk takes 64 x (12 + 2) bits and 8 bytes."""
    wire = SparseFormat(64, "2bit")
    assert wire.size(CHUNK) == 64 * (12 + 2) // 8 + 8
    assert wire.size(10 * CHUNK + 2048) == 10 * 120 + 32 * 14 // 8 + 8
    assert SparseFormat(64, "fp32").size(CHUNK) == 64 * 12 // 8 + 64 * 4


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_a_message_is_the_same_with_another_default_dtype(default: torch.dtype) -> None:
    wire, values = SparseFormat(64, "2bit"), values_of(5000, torch.float32)
    expected = wire.encode(values)
    torch.set_default_dtype(default)
    try:
        assert torch.equal(wire.encode(values), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_decoded_values_are_added() -> None:
    wire, values = SparseFormat(100, "2bit"), values_of(5000)
    total = torch.ones_like(values)
    wire.add_decoded(wire.encode(values), total)
    wire.add_decoded(wire.encode(values), total)
    torch.testing.assert_close(total, 1 + 2 * sent(values, 100, "2bit"))


def test_rows_of_gathered_bytes_need_no_alignment() -> None:
    wire, values = SparseFormat(3, "2bit"), values_of(4000, torch.float32)
    encoded = wire.encode(values)
    shifted = torch.cat([encoded.new_zeros(1), encoded])[1:]
    total = torch.zeros_like(values)
    wire.add_decoded(shifted, total)
    assert torch.equal(total, sent(values, 3, "2bit"))


def test_zeros_stay_zeros_and_a_broken_chunk_is_broken() -> None:
    for kind in ("2bit", "fp32"):
        assert not sent(torch.zeros(5000), 64, kind).any()
        values = values_of(2 * CHUNK)
        values[5] = torch.nan
        found = sent(values, 64, kind)
        assert found[:CHUNK].isnan().any() and found[CHUNK:].isfinite().all()


def summed_with_errors(comms: Comms, wire: SparseFormat) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return (sum of the ranks' messages, values that this rank's message left out, bytes that this rank sent)."""
    pending = comms.start_all_reduce(values_of(4200) * (comms.rank + 1), "sparse", wire)
    pending.start_second_phase()
    return pending.wait().clone(), pending.quantization_error(), comms.traffic.bytes


def on_gloo(wire: SparseFormat) -> tuple[torch.Tensor, torch.Tensor, float]:
    return summed_with_errors(Comms(dist.group.WORLD), wire)


@pytest.mark.parametrize("kind", ["2bit", "fp32"])
def test_a_sum_is_of_what_was_sent_and_goes_to_every_other_rank_once(ranks: RankPool, kind: str) -> None:
    wire = SparseFormat(64, kind)
    found = ranks.run(on_gloo, wire, world_size=3)
    of_threads = on_each(3, summed_with_errors, wire)
    messages = [values_of(4200) * (rank + 1) for rank in range(3)]
    parts = [sent(message, 64, kind) for message in messages]
    for rank, (total, lost, bytes_sent) in enumerate(found):
        torch.testing.assert_close(total, parts[0] + parts[1] + parts[2])
        assert torch.equal(total, found[0][0]) and torch.equal(total, of_threads[rank][0])
        assert torch.equal(lost, messages[rank] - parts[rank])
        assert bytes_sent == 2 * wire.size(4200, 8)


MESHES = [
    pytest.param(2, 2, id="2x2"),
    pytest.param(4, 1, id="4x1", marks=pytest.mark.deep),
    pytest.param(3, 1, id="3x1"),
]
SHAPES = (((40, 11),), ((5000,), (7,)), ((129,),))
"""Shapes of blocks, one of which has more than one chunk."""
WIRE = {"kind": "topk", "keep": 600, "error_feedback": True, "feedback_decay": 0.9}
PENALTY = {"z": 6.0, "min_rounds": 3, "temperature": 0.3, "clip": 0.5, "ema": 0.3}
SPIKES = {(4, 1, 0): math.nan, (9, 1, 1): 50.0, (10, 0, 2): math.inf, (13, 0, 1): 50.0}
METHODS = {
    "sparseloco": choices("sparseloco", every=3, wire=WIRE),
    "unrounded, layer-wise": choices("sparseloco", every=3, wire={**WIRE, "values": "fp32"}, schedule="layerwise"),
    "momentum": choices("diloco", every=3, warmup_steps=2, wire={**WIRE, "feedback_decay": 1.0}),
    "overlapped": choices(
        "streaming_diloco", every=5, schedule={"kind": "overlapped", "steps": 2, "fragments": 3}, wire=WIRE
    ),
    "delayed": choices("co2", every=3, wire=WIRE),
}


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
@pytest.mark.parametrize("sync", METHODS.values(), ids=METHODS.keys())
def test_methods_are_those_of_the_oracle(sync: Any, replicas: int, shard: int) -> None:
    scenario = Scenario(sync, replicas, shard, steps=14, shapes=SHAPES)
    assert_same_run(simulate(scenario), replay(scenario))


@pytest.mark.parametrize(("replicas", "shard"), MESHES[:2])
def test_a_replica_that_does_not_count_keeps_what_it_has_not_sent(replicas: int, shard: int) -> None:
    sync = edit(penalty=PENALTY, wire=WIRE)
    scenario = Scenario(sync, replicas, shard, steps=18, shapes=SHAPES, scales=SPIKES)
    got = simulate(scenario)
    assert got.counts[1] >= len(SPIKES), "too few exclusions, so nothing was tested"
    assert_same_run(got, replay(scenario))


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
def test_all_values_unrounded_are_the_mean_with_sgd(replicas: int, shard: int) -> None:
    whole = choices("sparseloco", every=3, wire={**WIRE, "keep": CHUNK, "values": "fp32"})
    plain = choices("diloco", every=3, outer={"kind": "sgd", "lr": 1.0})
    runs = [simulate(Scenario(sync, replicas, shard, steps=11, shapes=SHAPES)) for sync in (whole, plain)]
    assert_same_bits(*runs)
