"""Paired tests: whether two models differ on the same documents by more than luck."""

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
"""What is kept of each document of a task, see scores.answers."""


@dataclass(frozen=True)
class PairedTest:
    """A model against the baseline, on `n` documents."""

    difference: float
    """Its score minus the baseline's."""
    p: float
    """Two-sided."""
    test: str
    n: int


def mcnemar(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Two-sided exact p of right/wrong answers (1/0) to the same questions: a coin for each question that only one of
    the two got right."""
    only_ours = sum(a > b for a, b in zip(ours, theirs, strict=True))
    only_theirs = sum(b > a for a, b in zip(ours, theirs, strict=True))
    n, fewer = only_ours + only_theirs, min(only_ours, only_theirs)
    tail = sum(math.comb(n, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**n)


def paired_bootstrap(ours: Sequence[float], theirs: Sequence[float], weights: Sequence[float], seed: int = 0) -> float:
    """Two-sided p of the difference of two sums over the same weights (nats over bytes, or tokens): how often it changes
    sign when documents are drawn again."""
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
    """Both models' answers to the tasks of one score (several, if it is a group's). None where the documents are not the
    same or the metric has no test."""
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
    """One list over all tasks; empty if one of them has no such numbers."""
    return [value for task in tasks for value in task[key]] if all(key in task for task in tasks) else []
