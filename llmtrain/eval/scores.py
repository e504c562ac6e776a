"""Scores computed from per-document results: chance levels, bits per byte, and the data for paired tests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

ACCURACIES = ("acc", "acc_norm", "acc_bytes")
"""Metrics that have a chance level."""
STANDARD_ERRORS = 2.0
"""Largest distance from the chance level, in standard errors, that counts as near chance."""

Verdict = Literal["near chance", "below chance", ""]


def chance_of(choices: Sequence[Sequence[str]], gold: Sequence[Any]) -> float:
    """Return the accuracy that needs no understanding of the questions.

    This is the accuracy of uniform guessing or, if all documents have the same choices, of always giving the most
    common answer, whichever is higher.
    """
    guess = sum(1 / len(these) for these in choices) / len(choices)
    same_everywhere = len({tuple(these) for these in choices}) == 1
    commonest = max(Counter(map(str, gold)).values()) / len(gold) if same_everywhere else 0.0
    return max(guess, commonest)


def verdict(value: float, stderr: float, chance: float, n: int) -> Verdict:
    """Classify an accuracy as near chance, below chance, or above chance (the empty string).

    The standard error is the larger of the score's own and that of chance with `n` documents, because a score of 0
    or 1 has no standard error of its own.
    """
    error = max(stderr, math.sqrt(chance * (1 - chance) / n))
    if abs(value - chance) <= STANDARD_ERRORS * error:
        return "near chance"
    return "below chance" if value < chance else ""


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float | None]:
    """Return the ratio of two sums and its standard error over documents.

    The standard error is linearized (delta method), and None for fewer than two documents.
    """
    x, y = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    value = float(x.sum() / y.sum())
    if len(x) < 2:
        return value, None
    residuals = x - value * y
    return value, float(np.sqrt(residuals @ residuals / (len(x) - 1) / len(x)) / y.mean())


def bits_per_byte(nll: Sequence[float], byte_counts: Sequence[float]) -> tuple[float, float | None]:
    """Return summed negative log-likelihood (nats) / ln 2 / UTF-8 bytes, and its standard error."""
    value, error = ratio(nll, byte_counts)
    return value / math.log(2), None if error is None else error / math.log(2)


def per_document(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the per-document results of one task as lists of equal length, in the order of documents.

    `doc` identifies the document, and each numeric metric has a list. `nll` and `bytes` are the negative
    log-likelihood in nats and the UTF-8 bytes of the right answer as lm-evaluation-harness requested it (with the
    leading space); they are absent unless every document has a single right answer. If a task has several filters,
    a document appears once per filter, and only `doc` is returned.
    """
    ordered = sorted(samples, key=lambda sample: sample["doc_id"])
    kept: dict[str, list[Any]] = {"doc": [f"{s['doc_id']}:{str(s['doc_hash'])[:8]}" for s in ordered]}
    filters = {str(sample["filter"]) for sample in ordered}
    for metric in ordered[0]["metrics"] if len(filters) == 1 else ():
        values = [sample[metric] for sample in ordered]
        if all(isinstance(value, int | float | np.number) for value in values):
            kept[metric] = [float(value) for value in values]
    right = [_right_answer(sample) for sample in ordered]
    if len(filters) == 1 and all(right):
        kept["nll"], kept["bytes"] = (list(column) for column in zip(*right, strict=True))
    return kept


def choices_and_gold(samples: Sequence[Mapping[str, Any]]) -> tuple[list[list[str]], list[Any]]:
    """Return the compared continuations and the right answer of each multiple-choice document."""
    choices = [[argument[1] for argument in sample["arguments"]] for sample in samples]
    return choices, [sample["target"] for sample in samples]


def _right_answer(sample: Mapping[str, Any]) -> tuple[float, int] | None:
    """Return (nll, bytes) of the right continuation, or None unless there is exactly one with a log-likelihood."""
    arguments, responses, target = sample["arguments"], sample["filtered_resps"], sample["target"]
    if any(len(argument) != 2 or not isinstance(argument[1], str) for argument in arguments):
        return None
    if len(arguments) == 1:
        index = 0
    elif isinstance(target, int) and 0 <= target < len(arguments):
        index = target
    else:
        return None
    response = responses[index]
    if not (isinstance(response, tuple | list) and len(response) == 2):
        return None
    return -float(response[0]), len(arguments[index][1].encode())
