"""Tests of running moments: their powers have the same bits on every processor."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from llmtrain.running_moments import power


@pytest.mark.parametrize("base", [0.98, 0.95, 0.5])
def test_powers_are_products_that_round_alike_everywhere(base: float) -> None:
    exponents = torch.tensor([[0, 1, 2, 3], [10, 255, 1000, 100_000]])
    found = power(base, exponents)
    assert found.shape == exponents.shape and exponents[1, 3] == 100_000
    assert found[0].tolist() == [1.0, base, base * base, base * (base * base)]
    for exponent in (10, 255, 1000):
        exact = float(Fraction(base) ** exponent)
        assert found.flatten()[exponents.flatten().tolist().index(exponent)].item() == pytest.approx(exact, rel=1e-13)


def test_powers_have_the_same_bits_with_other_vector_instructions() -> None:
    """torch.pow computes a long row with vector instructions, and a single value without them."""
    counts = torch.arange(4001)
    alone = torch.cat([power(0.98, counts[i : i + 1]) for i in range(0, 4001, 7)])
    assert torch.equal(alone, power(0.98, counts)[::7])
