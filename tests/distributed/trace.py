"""Traces of runs on all replicas, and comparisons of two runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Trace:
    """Record of a run. Parameters are lists by block: [replicas, elements]."""

    forwards: list[list[np.ndarray]]
    """Parameters in the forward pass of each step; NaN where a replica has taken fewer steps than another."""
    final: list[np.ndarray]
    """Parameters after `finish`."""
    synchronous_steps: list[int]
    counts: tuple[int, int, int]
    """Numbers of synchronizations, anomalies and rollbacks."""
    agreed: list[list[tuple[int, int]]]
    """Pairs (step of the replica, global step), one each time that all ranks know the global step, by replica."""
    says_synchronized: list[bool] = field(default_factory=list)
    """True if the method reports that all replicas are equal, after each step and at the end."""
    bytes_sent: float = 0.0
    """Bytes that all ranks have sent over the replica axis."""
    squares: tuple[float, float] | None = None
    """Sums over all blocks in the last round: replicas x ||D||^2, if replicas keep an anchor, and the sum over replicas
    of ||D_n - D||^2. None if they are not reported."""


def assert_close(got: Trace, expected: Trace) -> None:
    """Check that parameters are equal up to rounding in every step: a block's largest error is at most 1e-12 of its
    largest value. NumPy's own assertion, which is slow, runs only for blocks that differ or have a NaN."""
    for step, (ours, theirs) in enumerate(_pairs(got, expected), start=1):
        for block, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            scale = np.abs(b[np.isfinite(b)]).max(initial=0.0)
            if (np.abs(a - b) <= 1e-12 * scale).all():
                continue
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * scale, err_msg=f"forward {step}, block {block}")


def assert_same_run(got: Trace, expected: Trace) -> None:
    """Check that parameters are equal up to rounding, decisions equal, and the final replicas of `got` identical."""
    assert got.synchronous_steps == expected.synchronous_steps
    assert got.agreed == expected.agreed
    assert_close(got, expected)
    for block in got.final:
        assert (block == block[0]).all(), "finish() left replicas that differ"
    assert got.counts == expected.counts
    if got.squares is not None and expected.squares is not None:
        np.testing.assert_allclose(got.squares, expected.squares, rtol=1e-9, atol=1e-12)


def assert_same_bits(got: Trace, expected: Trace) -> None:
    """Check that all parameters have the same bits in every step, and that events have the same counts."""
    for step, (ours, theirs) in enumerate(_pairs(got, expected), start=1):
        for block, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if not np.array_equal(a, b):
                np.testing.assert_array_equal(a, b, err_msg=f"forward {step}, block {block}")
    assert got.counts == expected.counts


def _pairs(got: Trace, expected: Trace) -> zip:
    """Pair the parameters of both runs in every forward pass, then at the end."""
    return zip([*got.forwards, got.final], [*expected.forwards, expected.final], strict=True)
