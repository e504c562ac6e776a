"""From the answers to each document: chance, bits per byte, and what paired tests need."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

ACCURACIES = ("acc", "acc_norm", "acc_bytes")
"""Metrics that have a chance level."""
STANDARD_ERRORS = 2.0
"""A score within so many of chance is near chance."""

Verdict = Literal["near chance", "below chance", ""]


def chance_of(choices: Sequence[Sequence[str]], gold: Sequence[Any]) -> float:
    """Accuracy without understanding the question: a guess among the choices or, where all documents have the same
    ones, the commonest answer every time."""
    guess = sum(1 / len(these) for these in choices) / len(choices)
    same_everywhere = len({tuple(these) for these in choices}) == 1
    commonest = max(Counter(map(str, gold)).values()) / len(gold) if same_everywhere else 0.0
    return max(guess, commonest)


def verdict(value: float, stderr: float, chance: float, n: int) -> Verdict:
    """What an accuracy may be called. The standard error is the score's or the one that chance has with `n` documents,
    whichever is larger: a score of 0 or 1 has none of its own."""
    error = max(stderr, math.sqrt(chance * (1 - chance) / n))
    if abs(value - chance) <= STANDARD_ERRORS * error:
        return "near chance"
    return "below chance" if value < chance else ""


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float | None]:
    """Sum over sum, and its standard error over documents (linearized; None for fewer than two)."""
    x, y = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    value = float(x.sum() / y.sum())
    if len(x) < 2:
        return value, None
    residuals = x - value * y
    return value, float(np.sqrt(residuals @ residuals / (len(x) - 1) / len(x)) / y.mean())


def bits_per_byte(nll: Sequence[float], byte_counts: Sequence[float]) -> tuple[float, float | None]:
    """Summed negative log-likelihood (nats) / ln 2 / UTF-8 bytes, and its standard error."""
    value, error = ratio(nll, byte_counts)
    return value / math.log(2), None if error is None else error / math.log(2)


def per_document(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What is kept of each document of one task: its name, numbers of each metric and, of the right answer, the negative
    log-likelihood in nats and the UTF-8 bytes, as lm-evaluation-harness asked for it (with the space before it).

    Lists of equal length, in the order of documents. A document may come more than once, under several filters.
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
    """Of multiple-choice documents: the continuations that were compared, and which is right."""
    choices = [[argument[1] for argument in sample["arguments"]] for sample in samples]
    return choices, [sample["target"] for sample in samples]


def _right_answer(sample: Mapping[str, Any]) -> tuple[float, int] | None:
    """(nll, bytes), where there is one right continuation whose likelihood was asked for."""
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
