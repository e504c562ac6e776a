"""Tests of wire formats: bit for bit against a NumPy reference, and against the properties that they promise."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from llmtrain.parallel.wire_format import WireFormat

BLOCK = 128
LEVELS = {"int8": 127, "int4": 7}
BYTES_PER_BLOCK = {"bf16": 256, "int8": 128 + 4, "int4": 64 + 4, "fp4": 64 + 4, "2bit": 32 + 4}
KINDS = ["bf16", *LEVELS]
TABLES = ["fp4", "2bit"]
"""Formats whose levels come from a table."""
FLOATS = [np.float32, np.float64]
BLOCKS = 60
SMALLEST = np.float32(2.0**-126)
"""Smallest scale of int8, int4 and fp4: the smallest normal float32."""


def rounded(values: np.ndarray, kind: str) -> np.ndarray:
    """Return the reference: what arrives of `values` [..., multiple of 128], float32 or float64, computed in their own precision."""
    if kind == "bf16":
        bits = values.astype(np.float32).view(np.uint32)
        nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)  # ties to even
        return np.where(np.isnan(values), np.nan, nearest).astype(values.dtype)
    if kind in BY_TABLE:
        return BY_TABLE[kind](values)
    arrived = []
    for block in values.reshape(-1, BLOCK):
        scale = np.maximum(np.float32(np.max(np.abs(block)) / values.dtype.type(LEVELS[kind])), SMALLEST)
        if not np.isfinite(scale):
            arrived.append(np.full_like(block, np.nan))
        else:
            inverse = values.dtype.type(1) / values.dtype.type(scale)
            codes = np.clip(np.rint(block * inverse), -LEVELS[kind], LEVELS[kind]).astype(np.int64)  # no -0.0
            arrived.append(codes.astype(values.dtype) * values.dtype.type(scale))
    return np.stack(arrived).reshape(values.shape)


def nearest_of(values: np.ndarray, levels: list[float], bounds: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return, for each value, the scale of its block times levels[n], with the value's sign. Here, n is the number of the block's
    bounds that the value's magnitude exceeds."""
    blocks = values.reshape(-1, BLOCK)
    magnitudes = np.array(levels, values.dtype)[(np.abs(blocks)[..., None] > bounds[:, None]).sum(-1)]
    arrived = np.where(blocks < 0, -magnitudes, magnitudes) * scales.astype(values.dtype)
    return np.where(np.isfinite(scales), arrived, np.nan).reshape(values.shape)


def powers_of_two(values: np.ndarray) -> np.ndarray:
    """Return the reference for fp4. It compares in units of the scale, in which bounds are exact."""
    blocks = values.reshape(-1, BLOCK)
    scales = np.maximum(np.abs(blocks).max(-1, keepdims=True).astype(np.float32), SMALLEST)
    quotients = blocks * (1 / scales.astype(values.dtype))
    quotients = quotients.astype(np.float32).astype(values.dtype)
    levels = [0, *(2.0**-power for power in range(6, -1, -1))]
    bounds = np.array([(low + high) / 2 for low, high in itertools.pairwise(levels)], values.dtype)
    return nearest_of(quotients, levels, np.tile(bounds, (len(blocks), 1)), scales).reshape(values.shape)


def four_levels(values: np.ndarray) -> np.ndarray:
    """Return the reference for 2bit. `low` and `high` are the best two magnitudes for a normal distribution of standard deviation 1,
    and `mean` is its mean magnitude."""
    low, high, mean = 0.4528, 1.5104, 0.79788
    scales = np.abs(values.reshape(-1, BLOCK)).mean(-1, keepdims=True, dtype=np.float64).astype(np.float32)
    bounds = values.dtype.type(0.9816 / mean) * scales.astype(values.dtype)
    return nearest_of(values, [low / mean, high / mean], bounds, scales)


BY_TABLE = {"fp4": powers_of_two, "2bit": four_levels}


def sent(values: np.ndarray, kind: str) -> np.ndarray:
    """Return what arrives of `values`."""
    wire, tensor = WireFormat(kind), torch.from_numpy(values.copy())
    payload = wire.encode(tensor)
    assert torch.equal(tensor.nan_to_num(), torch.from_numpy(values).nan_to_num()), "encode changed its input"
    return wire.decode(payload, tensor.dtype).numpy()


def one_outlier_per_block(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    values = rng.normal(size=shape)
    blocks = values.reshape(-1, BLOCK)
    blocks[np.arange(len(blocks)), rng.integers(BLOCK, size=len(blocks))] *= 1e4
    return values


def magnitude_by_block(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Draw blocks that are up to 30 orders of magnitude apart, so that a scale taken from another block shows."""
    powers = 10.0 ** rng.uniform(-15, 15, size=(shape[0], shape[1] // BLOCK))
    return rng.normal(size=shape) * powers.repeat(BLOCK, axis=1)


DISTRIBUTIONS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "uniform": lambda rng, shape: rng.uniform(-1, 1, size=shape),
    "positive": lambda rng, shape: rng.uniform(0.5, 1, size=shape),
    "negative": lambda rng, shape: -rng.uniform(0.5, 1, size=shape),
    "constant": lambda rng, shape: np.full(shape, -0.3),
    "student": lambda rng, shape: rng.standard_t(1.1, size=shape),
    "lognormal": lambda rng, shape: rng.lognormal(sigma=4, size=shape) * rng.choice([-1, 1], size=shape),
    "sparse": lambda rng, shape: rng.normal(size=shape) * (rng.uniform(size=shape) < 0.01),
    "outlier": one_outlier_per_block,
    "by block": magnitude_by_block,
    "tiny": lambda rng, shape: rng.normal(size=shape) * 1e-34,
    "huge": lambda rng, shape: rng.uniform(-3e38, 3e38, size=shape),
}


def draw(distribution: str, dtype: type, rows: int, seed: int = 0) -> np.ndarray:
    return DISTRIBUTIONS[distribution](np.random.default_rng(seed), (rows, BLOCKS * BLOCK)).astype(dtype)


def steps(values: np.ndarray, kind: str) -> np.ndarray:
    """Return the exact distance between two levels at each value."""
    largest = np.abs(values.astype(np.float64)).reshape(-1, BLOCK).max(axis=1)
    return (largest / LEVELS[kind]).repeat(BLOCK).reshape(values.shape)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", [*KINDS, *TABLES])
def test_bit_for_bit_as_the_reference(kind, dtype):
    for distribution, rows in itertools.product(DISTRIBUTIONS, (1, 3)):
        values = draw(distribution, dtype, rows)
        arrived = sent(values, kind)
        assert arrived.dtype == dtype and arrived.shape == values.shape
        same = np.array_equal(arrived.view(np.uint8), rounded(values, kind).view(np.uint8))
        assert same, (distribution, rows)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", LEVELS)
def test_the_reference_is_off_by_half_a_step_at_most(kind, dtype):
    """The bound is half a step and three rounding errors: of the inverse and of the two products. Each is half an epsilon of up to
    `levels` steps. The step itself is stored as a float32, which is off by up to 2^-24 of itself."""
    allowed = 0.5 * (1 + 2.0**-24) + 1.5 * LEVELS[kind] * np.finfo(dtype).eps
    for distribution in DISTRIBUTIONS:
        values = draw(distribution, dtype, 3)
        error = np.abs(rounded(values, kind).astype(np.float64) - values.astype(np.float64))
        assert (error <= steps(values, kind) * allowed).all(), distribution


@pytest.mark.parametrize("dtype", FLOATS)
def test_bf16s_reference_is_off_by_one_part_in_256_at_most(dtype):
    for distribution in ("normal", "outlier", "lognormal", "tiny"):
        values = draw(distribution, dtype, 2)
        assert (np.abs(rounded(values, "bf16") - values) <= np.abs(values) * 2.0**-8).all(), distribution


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [*LEVELS, "fp4"])
def test_values_of_16_bits_arrive_as_if_they_had_32(kind, dtype):
    """Arithmetic in 16 bits would round a group's largest value beyond the last level, or a scale's inverse to infinity."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10 ** torch.linspace(-4, 1, BLOCKS).repeat_interleave(BLOCK)
    values = (torch.randn(4, BLOCKS * BLOCK, generator=generator) * sizes).to(dtype)
    wire = WireFormat(kind)
    arrived, expected = (wire.decode(wire.encode(given), given.dtype) for given in (values, values.float()))
    assert torch.equal(arrived, expected.to(dtype))


@pytest.mark.parametrize("kind", LEVELS)
def test_the_bound_is_reached_and_not_one_sided(kind):
    """An error that is always far below half a step would need more levels than the bytes can hold."""
    values = draw("uniform", np.float64, 1)
    error = (sent(values, kind) - values) / steps(values, kind)
    assert error.max() > 0.49 and error.min() < -0.49
    assert abs(error.mean()) < 4 * math.sqrt(1 / 12 / error.size), "rounding to the nearest is unbiased"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", LEVELS)
def test_the_smallest_values_are_off_by_half_the_smallest_scale_at_most(kind, dtype):
    """Without a smallest scale, their scale would be subnormal, and its inverse infinite."""
    least = 2.0**-149
    for largest in (1, 3, 10, 63, 64, 1000, 10**4, 10**6, 2**22, 2**23, 2**23 + 1, 7 * 2**23, 127 * 2**23):
        values = (np.linspace(-largest, largest, BLOCK).round()[None] * least).astype(dtype)
        error = np.abs(sent(values, kind).astype(np.float64) - values.astype(np.float64))
        half = np.maximum(steps(values, kind), SMALLEST) / 2
        assert (error <= half * (1 + 3 * LEVELS[kind] * np.finfo(np.float32).eps)).all(), largest
    vanishing = np.full((1, BLOCK), 2.0**-127, np.float64)
    assert not sent(vanishing, kind).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_arrive_as_zeros(kind, dtype):
    values = np.zeros((3, 2 * BLOCK), dtype)
    values[1, :BLOCK] = 5.0  # a block of zeros beside one that is not
    values[2, ::2] = -0.0
    arrived = sent(values, kind)
    assert not arrived[values == 0].any() and arrived[values != 0].all()


@pytest.mark.parametrize("kind", LEVELS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_multiples_of_the_scale_arrive_exactly(kind, dtype):
    rng, levels = np.random.default_rng(1), LEVELS[kind]
    codes = rng.integers(-levels, levels + 1, size=(200, BLOCK))
    codes[np.arange(200), rng.integers(BLOCK, size=200)] = levels * rng.choice([-1, 1], size=200)
    # 17 bits of scale times 7 bits of code: every product is exact in float32
    scales = rng.integers(1, 2**17, size=(200, 1)) * 2.0 ** rng.integers(-100, 80, size=(200, 1))
    values = (codes * scales).astype(dtype).reshape(4, -1)
    np.testing.assert_array_equal(sent(values, kind), values)


def test_what_bf16_holds_arrives_exactly():
    """All 2^16 bf16 values are sent, infinities and NaNs included."""
    values = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32).reshape(2, -1)
    arrived = sent(values, "bf16")
    numbers = ~np.isnan(values)
    assert np.isnan(arrived[~numbers]).all() and (~numbers).sum() == 2 * 127
    np.testing.assert_array_equal(arrived[numbers].view(np.uint32), values[numbers].view(np.uint32))


@pytest.mark.parametrize("kind", LEVELS)
def test_halfway_goes_to_the_even_code(kind):
    levels = LEVELS[kind]
    halves = np.arange(-levels + 0.5, levels)[:127]
    values = np.zeros((1, BLOCK), np.float32)
    values[0, : len(halves)], values[0, -1] = halves * 0.25, levels * 0.25
    codes = sent(values, kind)[0, : len(halves)] / 0.25
    assert set(np.abs(codes - halves)) == {0.5} and not (codes % 2).any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_sign_changes_nothing_else(kind):
    for distribution in ("normal", "outlier"):
        values = draw(distribution, np.float32, 2)
        np.testing.assert_array_equal(sent(-values, kind), -sent(values, kind), distribution)


def test_int4_keeps_every_pair_of_levels():
    """With 15 x 15 pairs of neighbors, each level is seen in both halves of a byte."""
    pairs = np.array([(a, b) for a in range(-7, 8) for b in range(-7, 8)]).reshape(-1)
    values = np.full((1, 8 * BLOCK), 7.0, np.float32)
    for block in range(8):  # 63 pairs per block, and a pair of sevens that makes its scale 1
        part = pairs[block * 126 :][:126]
        values[0, block * BLOCK :][: len(part)] = part
    np.testing.assert_array_equal(sent(values, "int4"), values)
    codes = WireFormat("int4").encode(torch.from_numpy(values))[:, : values.size // 2]
    assert len(codes.unique()) == 15 * 15, "a byte has two codes"


def test_int8_keeps_every_level():
    values = np.full((1, 4 * BLOCK), 127.0, np.float32)
    for block, low in enumerate([-127, -64, 0, 64]):
        part = np.arange(low, min(low + BLOCK - 1, 128))
        values[0, block * BLOCK :][: len(part)] = part
    assert len(np.unique(values)) == 255
    np.testing.assert_array_equal(sent(values, "int8"), values)


@pytest.mark.parametrize("kind", [*KINDS, *TABLES])
def test_a_payload_is_as_long_as_size_says(kind):
    for dtype, rows, blocks in itertools.product(FLOATS, (1, 2, 5), (1, 2, 7)):
        wire, values = WireFormat(kind), torch.from_numpy(draw("normal", dtype, rows)[:, : blocks * BLOCK].copy())
        payload = wire.encode(values)
        assert payload.dtype == torch.uint8
        assert payload.shape == (rows, wire.size(blocks * BLOCK)) == (rows, blocks * BYTES_PER_BLOCK[kind])
        back = wire.decode(payload, values.dtype)
        assert back.shape == values.shape and back.dtype == values.dtype


@pytest.mark.parametrize("kind", [*KINDS, *TABLES])
def test_a_row_is_a_message_of_its_own(kind):
    """Rows are cut apart, sent and put together in another order."""
    wire, values = WireFormat(kind), torch.from_numpy(draw("by block", np.float32, 4))
    payload = wire.encode(values)
    for row in range(4):
        assert torch.equal(payload[row : row + 1], wire.encode(values[row : row + 1]))
    reordered = torch.cat([payload[i : i + 1] for i in (2, 0, 3, 1)])
    assert torch.equal(wire.decode(reordered, torch.float32), wire.decode(payload, torch.float32)[[2, 0, 3, 1]])


BAD = ([np.nan], [np.inf], [-np.inf], [np.inf, -np.inf], [np.nan, np.inf])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", [*KINDS, *TABLES])
def test_what_is_not_finite_never_arrives_healthy_and_harms_no_other_block(kind, dtype):
    healthy = draw("normal", dtype, 3)
    expected = rounded(healthy, kind)
    for bad, (row, block, place) in itertools.product(BAD, [(0, 0, 0), (1, 1, 5), (2, BLOCKS - 1, 126)]):
        values = healthy.copy()
        at = slice(block * BLOCK + place, block * BLOCK + place + len(bad))
        values[row, at] = bad
        arrived = sent(values, kind)
        broken = np.zeros(values.shape, bool)
        # bf16 has no blocks: its values are rounded one by one
        broken[row, at if kind == "bf16" else slice(block * BLOCK, (block + 1) * BLOCK)] = True
        assert not np.isfinite(arrived[broken]).any(), (bad, row)
        np.testing.assert_array_equal(arrived[~broken], expected[~broken], f"{bad} in row {row}")


@pytest.mark.parametrize("kind", [*KINDS, *TABLES])
def test_what_float32_cannot_hold_is_not_finite(kind):
    values = draw("normal", np.float64, 1)
    values[0, 130] = 1e300
    arrived = sent(values, kind)
    assert not np.isfinite(arrived[0, 130])
    assert np.isfinite(arrived[0, :BLOCK]).all() and np.isfinite(arrived[0, 2 * BLOCK :]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_whole_blocks_that_cover_the_message_and_no_more(kind):
    wire = WireFormat(kind)
    small = [(numel, ranks) for numel in range(1, 1600) for ranks in range(1, 13)]
    edges = [
        (ranks * BLOCK * blocks + extra, ranks)
        for ranks in (1, 2, 3, 7, 48, 64, 1000)
        for blocks in (1, 5, 10**6 + 1, 2**30 + 1)
        for extra in (-1, 0, 1)
    ]
    for numel, ranks in small + edges:
        chunk = wire.padded_chunk(numel, ranks)
        assert chunk % BLOCK == 0
        assert (chunk - BLOCK) * ranks < numel <= chunk * ranks, (numel, ranks)


@pytest.mark.parametrize("is_known", [True, False])
def test_compiled_code_is_asked_to_divide_as_torch_does(monkeypatch, is_known):
    """The effect shows only on a GPU, in tests/gpu/test_kernels.py. Not all versions of torch have the option."""
    asked, compile_function = [], torch.compile

    def compiled(function, options=None, **rest):
        if options and not is_known:
            raise RuntimeError("Unexpected optimization option")
        asked.append(options)
        return compile_function(function, options=options, **rest)

    monkeypatch.setattr(torch, "compile", compiled)
    WireFormat("int8", compiled=True)
    assert asked == 2 * [{"eager_numerics.division_rounding": True} if is_known else None]


@pytest.mark.deep
def test_compiled_rounds_to_the_same_bits():
    """Compiling takes ten seconds. Only for messages of a single block, torch compiles the code again."""
    plain, compiled = WireFormat("int4"), WireFormat("int4", compiled=True)
    for n, (rows, blocks) in enumerate([(3, 7), (2, 40), (4, 1), (5, BLOCKS)]):
        stance = "fail_on_recompile" if n and blocks > 1 else "default"
        for distribution in DISTRIBUTIONS:
            values = torch.from_numpy(draw(distribution, np.float32, rows)[:, : blocks * BLOCK].copy())
            payload = plain.encode(values)
            with torch.compiler.set_stance(stance):
                assert torch.equal(compiled.encode(values), payload), distribution
                assert torch.equal(compiled.decode(payload, torch.float32), plain.decode(payload, torch.float32))
    values[0, 5], values[-1, BLOCK] = torch.nan, torch.inf
    arrived, expected = (wire.decode(wire.encode(values), torch.float32) for wire in (compiled, plain))
    assert torch.equal(arrived.isfinite(), expected.isfinite()) and not arrived[0, :BLOCK].isfinite().any()
    assert torch.equal(arrived[expected.isfinite()], expected[expected.isfinite()])
