"""Paired significance tests for two models evaluated on the same documents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MCNEMAR = "McNemar's exact test"
BOOTSTRAP = "paired bootstrap"
RESAMPLES = 10_000
Answers = Mapping[str, Sequence[Any]]
"""{column: one value per document} for one task; see scores.per_document."""


@dataclass(frozen=True)
class PairedTest:
    """Result of a paired test of a model against the baseline on `n` documents."""

    difference: float
    """The model's score minus the baseline's."""
    p: float
    """Two-sided p-value."""
    test: str
    n: int


def mcnemar(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the two-sided exact p-value of right/wrong answers (1/0) to the same questions.

    Under the null hypothesis, each question that only one model answered correctly is a fair coin toss.
    """
    only_ours = sum(a > b for a, b in zip(ours, theirs, strict=True))
    only_theirs = sum(b > a for a, b in zip(ours, theirs, strict=True))
    n, fewer = only_ours + only_theirs, min(only_ours, only_theirs)
    tail = sum(math.comb(n, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**n)


def paired_bootstrap(ours: Sequence[float], theirs: Sequence[float], weights: Sequence[float], seed: int = 0) -> float:
    """Return the two-sided p-value of the difference between two ratios of sums with the same denominator.

    Such ratios are nats per byte or per token, with `weights` as the denominators of the documents. The p-value
    follows from how often the difference changes sign when documents are resampled.
    """
    difference = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    weight = np.asarray(weights, dtype=np.float64)
    draw = np.random.default_rng(seed)
    chunk = max(1, 4_000_000 // len(difference))
    signs = np.zeros(2, dtype=np.int64)
    for done in range(0, RESAMPLES, chunk):
        chosen = draw.integers(len(difference), size=(min(chunk, RESAMPLES - done), len(difference)))
        means = difference[chosen].sum(axis=1) / weight[chosen].sum(axis=1)
        signs += (means <= 0).sum(), (means >= 0).sum()
    return min(1.0, 2 * (int(signs.min()) + 1) / (RESAMPLES + 1))


def compare(ours: Sequence[Answers], theirs: Sequence[Answers], metric: str) -> PairedTest | None:
    """Test two models on one score, given their results on the score's tasks (several for a group).

    Bits per byte uses the paired bootstrap, and metrics of 0 and 1 use McNemar's exact test. Returns None if the
    documents differ or the metric has no test.
    """
    if len(ours) != len(theirs) or any(a["doc"] != b["doc"] for a, b in zip(ours, theirs, strict=True)):
        return None
    n = sum(len(task["doc"]) for task in ours)
    if metric == "bits_per_byte":
        mine, other, weights = _joined(ours, "nll"), _joined(theirs, "nll"), _joined(ours, "bytes")
        if not (mine and other) or weights != _joined(theirs, "bytes"):
            return None
        total = math.log(2) * sum(weights)
        return PairedTest((sum(mine) - sum(other)) / total, paired_bootstrap(mine, other, weights), BOOTSTRAP, n)
    mine, other = _joined(ours, metric), _joined(theirs, metric)
    if not (mine and other) or not set(mine) | set(other) <= {0.0, 1.0}:
        return None
    return PairedTest((sum(mine) - sum(other)) / n, mcnemar(mine, other), MCNEMAR, n)


def _joined(tasks: Sequence[Answers], key: str) -> list[float]:
    """Return the values of all tasks as one list, or an empty list if any task lacks them."""
    return [value for task in tasks for value in task[key]] if all(key in task for task in tasks) else []
