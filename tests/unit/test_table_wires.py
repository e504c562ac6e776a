"""Tests of wire formats whose levels come from a table: fp4 and 2bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from llmtrain.parallel.wire_format import HIGH, LOW, POWERS, THRESHOLD, WireFormat
from tests.unit.test_wire import BLOCK, TABLES, draw, sent


def test_the_levels_of_2bit_have_the_least_error_for_a_normal_distribution() -> None:
    """Each level is the mean of the values that it stands for, and the threshold lies halfway between the levels (Lloyd's
    conditions)."""
    values = np.abs(np.random.default_rng(0).normal(size=4_000_000))
    scale = values.mean()
    small = values < THRESHOLD * scale
    assert values[small].mean() / scale == pytest.approx(LOW, rel=2e-3)
    assert values[~small].mean() / scale == pytest.approx(HIGH, rel=2e-3)
    assert pytest.approx((LOW + HIGH) / 2, rel=1e-4) == THRESHOLD
    error = np.where(small, LOW, HIGH) * scale - values
    assert (error**2).mean() == pytest.approx(0.1175, rel=0.01), "of a variance of 1 (Max 1960)"


def test_fp4_is_off_by_a_third_at_most_down_to_a_64th_of_the_largest() -> None:
    values = draw("lognormal", np.float64, 3)
    largest = np.abs(values).reshape(-1, BLOCK).max(-1).repeat(BLOCK).reshape(values.shape)
    error = np.abs(sent(values, "fp4") - values)
    large = np.abs(values) >= largest / 64
    assert large.any() and (error[large] <= np.abs(values)[large] / 3 * (1 + 1e-6)).all()
    assert (error[~large] <= largest[~large] / 128 * (1 + 1e-6)).all()


def test_fp4_keeps_powers_of_two_and_zeros() -> None:
    levels = [*POWERS, *(-power for power in POWERS[1:])]
    values = np.array(list(itertools.product(levels, levels)), np.float32).reshape(-1)
    values = np.pad(values, (0, 4 * BLOCK - len(values)), constant_values=1.0)
    for block in range(4):
        values[block * BLOCK] = 1.0  # so that this is the scale
    values = values[None] * np.float32(0.375)
    np.testing.assert_array_equal(sent(values, "fp4"), values)


def test_fp4_rounds_halfway_values_down() -> None:
    """A value halfway between two magnitudes becomes the smaller one. Only a value above the middle becomes the larger one."""
    halfway = [(low + high) / 2 for low, high in itertools.pairwise(POWERS)]
    values = np.pad(np.array([1.0, *halfway, *np.negative(halfway)], np.float32), (0, BLOCK - 1 - 2 * len(halfway)))
    expected = np.pad(np.array([1.0, *POWERS[:-1], *np.negative(POWERS[:-1])], np.float32), (0, BLOCK - 15))
    np.testing.assert_array_equal(sent(values[None], "fp4"), expected[None])
    above = np.nextafter(values, 2 * values)
    above[0] = 1.0
    expected = np.pad(np.array([1.0, *POWERS[1:], *np.negative(POWERS[1:])], np.float32), (0, BLOCK - 15))
    np.testing.assert_array_equal(sent(above[None], "fp4"), expected[None])


def test_2bit_keeps_its_four_levels_in_every_place_of_a_byte() -> None:
    """Codes of random values are those of a NumPy reference, in each of the four places of a byte."""
    rng = np.random.default_rng(3)
    wire = WireFormat("2bit")
    blocks = rng.normal(size=(50, BLOCK)).astype(np.float32).reshape(1, -1)
    payload = wire.encode(torch.from_numpy(blocks))
    codes = payload[0, : blocks.size // 4].numpy()
    unpacked = np.stack([codes >> shift & 3 for shift in (0, 2, 4, 6)], -1).reshape(-1)
    scales = np.abs(blocks.reshape(-1, BLOCK)).mean(-1).repeat(BLOCK)
    expected = 2 * (blocks[0] < 0) + (np.abs(blocks[0]) > THRESHOLD * scales)
    assert (unpacked != expected).mean() < 1e-3, "codes may differ only at the threshold"
    assert len(np.unique(codes)) > 200


@pytest.mark.parametrize("kind", TABLES)
def test_blocks_of_zeros_arrive_as_zeros(kind: str) -> None:
    values = draw("normal", np.float32, 2)
    values[1, BLOCK : 2 * BLOCK] = 0.0
    arrived = sent(values, kind)
    assert not arrived[1, BLOCK : 2 * BLOCK].any() and arrived[0].any()


@pytest.mark.deep
@pytest.mark.parametrize("kind", TABLES)
def test_compiled_code_rounds_alike(kind: str) -> None:
    values = torch.from_numpy(draw("student", np.float32, 2))
    wire, compiled = WireFormat(kind), WireFormat(kind, compiled=True)
    payload = compiled.encode(values)
    same = (payload == wire.encode(values)).float().mean()
    assert same > 1 - 1e-4, "codes may differ only at thresholds, where a fused product rounds differently"
    torch.testing.assert_close(
        compiled.decode(payload, values.dtype), wire.decode(payload, values.dtype), rtol=1e-6, atol=0
    )
