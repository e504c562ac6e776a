"""A sum over a rounding wire in NumPy: everybody's message rounded, and their sum rounded once more."""

from __future__ import annotations

import math

import numpy as np

from tests.unit.test_wire import BLOCK, rounded


def rounded_sum(messages: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(the sum, what each rank's rounding left out) of [ranks, elements]; a rank also rounds its chunk of the sum. In float64
    the sum of a few rounded values has no error, so the order of adding does not show."""
    ranks, numel = messages.shape
    padded = whole_blocks(messages)
    total = rounded(padded, kind).sum(0)
    result = rounded(total, kind)
    lost = padded - rounded(padded, kind)
    chunk = math.ceil(padded.shape[1] // BLOCK / ranks) * BLOCK
    for rank in range(ranks):
        part = slice(rank * chunk, (rank + 1) * chunk)
        lost[rank, part] += (total - result)[part]
    return result[:numel], lost[:, :numel]


def whole_blocks(values: np.ndarray) -> np.ndarray:
    """[..., n] with zeros after it, up to a multiple of BLOCK."""
    missing = -values.shape[-1] % BLOCK
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
