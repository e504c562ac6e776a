"""What a run did, on all replicas, and how two runs are compared."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Trace:
    """Parameters as [block] -> [replicas, elements]."""

    forwards: list[list[np.ndarray]]
    """What the forward of each step computed with; NaN where a replica has done fewer steps than another."""
    final: list[np.ndarray]
    """The parameters after `finish`."""
    synchronous_steps: list[int]
    counts: tuple[int, int, int]
    """Synchronizations, anomalies, rollbacks."""
    agreed: list[list[tuple[int, int]]]
    """By replica: (its step, the run's step), each time that all know how far the run is."""
    says_synchronized: list[bool] = field(default_factory=list)
    """After each step, and at the end: the method says that all replicas are equal."""
    bytes_sent: float = 0.0
    """Over the replica axis, by all ranks."""
    squares: tuple[float, float] | None = None
    """Of the last round, in all blocks: replicas x ||D||^2, if they keep an anchor, and the sum of ||D_n - D||^2. None where
    they are not reported."""


def assert_close(got: Trace, expected: Trace) -> None:
    """Parameters equal up to rounding in every step: a block's largest error is below 1e-12 of its largest value. NumPy's own
    assertion, which is slow, is asked only where there is something to say or a NaN."""
    for step, (ours, theirs) in enumerate(_pairs(got, expected), start=1):
        for block, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            scale = np.abs(b[np.isfinite(b)]).max(initial=0.0)
            if (np.abs(a - b) <= 1e-12 * scale).all():
                continue
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * scale, err_msg=f"forward {step}, block {block}")


def assert_same_run(got: Trace, expected: Trace) -> None:
    """Equal parameters up to rounding, equal decisions, and replicas that end equal to the last bit."""
    assert got.synchronous_steps == expected.synchronous_steps
    assert got.agreed == expected.agreed
    assert_close(got, expected)
    for block in got.final:
        assert (block == block[0]).all(), "finish() left replicas that differ"
    assert got.counts == expected.counts
    if got.squares is not None and expected.squares is not None:
        np.testing.assert_allclose(got.squares, expected.squares, rtol=1e-9, atol=1e-12)


def assert_same_bits(got: Trace, expected: Trace) -> None:
    """Equal decisions, and not one bit of any parameter differs in any step."""
    for step, (ours, theirs) in enumerate(_pairs(got, expected), start=1):
        for block, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if not np.array_equal(a, b):
                np.testing.assert_array_equal(a, b, err_msg=f"forward {step}, block {block}")
    assert got.counts == expected.counts


def _pairs(got: Trace, expected: Trace) -> zip:
    """(ours, theirs) of every forward, then of the end."""
    return zip([*got.forwards, got.final], [*expected.forwards, expected.final], strict=True)
