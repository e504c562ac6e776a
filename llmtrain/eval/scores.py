"""Scores of evaluation units: their cache, their statistics, and paired tests of two models on the same documents."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from llmtrain.errors import UserError
from llmtrain.files import atomic_write

Key = dict[str, Any]
"""Values that a result depends on besides the checkpoint, as plain JSON."""
Answers = Mapping[str, Sequence[Any]]
"""{column: one value per document} for one task; see `harness.per_document`."""
ACCURACIES = ("acc", "acc_norm", "acc_bytes")
"""Metrics that have a chance level."""
SEPARATE = "separate_documents"
"""Key of `Entry.about` for texts whose documents the model has read one at a time."""
STANDARD_ERRORS = 2.0
"""Largest distance from the chance level, in standard errors, that counts as near chance."""
MCNEMAR = "McNemar's exact test"
BOOTSTRAP = "paired bootstrap"
RESAMPLES = 10_000


class Entry(BaseModel):
    """Results of one task, text file or set of prompts for one checkpoint."""

    model_config = ConfigDict(extra="forbid")

    scores: dict[str, dict[str, int | float | None]] = {}
    """{name: {metric: value, metric_stderr: standard error or None, n: number of documents}}."""
    about: dict[str, dict[str, Any]] = {}
    """{name: {version, few_shot (text: window), members, chance}}; `chance` is absent if there is no chance level, and SEPARATE
    unless it is true."""
    shown: list[str] = []
    """Names to show in the table; a group is shown instead of its members."""
    answers: dict[str, dict[str, list[Any]]] = {}
    """{task: {column: one value per document}}; see `harness.per_document`."""
    measured: dict[str, Any] = {}
    """{date, versions: {package: version}} of the evaluation, which may be older than the results file."""
    written: list[dict[str, str]] = []
    """[{prompt, text}] for each prompt of the suite; `text` includes the prompt."""


class Cache:
    """Cached results of one checkpoint: one JSON file per finished evaluation unit."""

    def __init__(self, folder: Path, fingerprint: str):
        self.folder, self.fingerprint = folder, fingerprint

    def path(self, name: str, key: Key) -> Path:
        text = json.dumps(self._full_key(key), sort_keys=True)
        return self.folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"

    def read(self, name: str, key: Key) -> Entry | None:
        """Return the cached entry, or None if the unit is not finished or its file is damaged."""
        try:
            content = json.loads(self.path(name, key).read_text(encoding="utf-8"))
            return Entry.model_validate(content["entry"]) if content["key"] == self._full_key(key) else None
        except (OSError, ValueError, KeyError, TypeError, ValidationError):
            return None

    def write(self, name: str, key: Key, entry: Entry) -> None:
        write_json(self.path(name, key), {"key": self._full_key(key), "entry": entry.model_dump()})

    def _full_key(self, key: Key) -> Key:
        return {"checkpoint": self.fingerprint, **key}


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON atomically: after a crash, the file has either its old or its new content.

    Raises UserError if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"{path} can't be written ({error.strerror}); choose another folder with --out") from None


def chance_of(tasks: Sequence[tuple[Sequence[Sequence[str]], Sequence[Any]]]) -> float:
    """Return the accuracy that needs no understanding of the questions, given the (choices, right answers) of each task.

    This is the accuracy of uniform guessing or, for questions with the same choices throughout, of always giving the most
    common answer, whichever is higher. Tasks with the same choices throughout, such as MMLU's subjects with their letters, count
    as one, because the most common answer of few questions is common by accident.
    """
    alike: dict[Any, tuple[list[Sequence[str]], list[Any]]] = {}
    for number, (choices, gold) in enumerate(tasks):
        kinds = {tuple(these) for these in choices}
        pooled = alike.setdefault(kinds.pop() if len(kinds) == 1 else number, ([], []))
        pooled[0].extend(choices)
        pooled[1].extend(gold)
    rights = 0.0
    for kind, (choices, gold) in alike.items():
        guessed = sum(1 / len(these) for these in choices)
        has_one_kind = isinstance(kind, tuple) and len(gold) > len(kind)
        rights += max(guessed, max(Counter(map(str, gold)).values()) if has_one_kind else 0.0)
    return rights / sum(len(gold) for _, gold in alike.values())


def have_one_chance_level(tasks: Sequence[tuple[Sequence[Sequence[str]], Sequence[Any]]]) -> bool:
    """Return whether uniform guessing has the same accuracy, to within 0.01, in all `tasks`, which are as in `chance_of`."""
    levels = [sum(1 / len(these) for these in choices) / len(choices) for choices, _ in tasks]
    return max(levels) - min(levels) <= 0.01


def compare_with_chance(value: float, stderr: float, chance: float, n: int) -> str:
    """Classify an accuracy as near chance, below chance, or above chance (the empty string).

    The standard error is the larger of the score's own and that of chance with `n` documents, because a score of 0
    or 1 has no standard error of its own.
    """
    error = max(stderr, math.sqrt(chance * (1 - chance) / n))
    if abs(value - chance) <= STANDARD_ERRORS * error:
        return "near chance"
    return "below chance" if value < chance else ""


def ratio_of_sums(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float | None]:
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
    value, error = ratio_of_sums(nll, byte_counts)
    return value / math.log(2), None if error is None else error / math.log(2)


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
    tail = ways = 1  # ways: n choose k
    for k in range(fewer):
        ways = ways * (n - k) // (k + 1)
        tail += ways
    return min(1.0, 2 * tail / 2**n)


def paired_bootstrap(ours: Sequence[float], theirs: Sequence[float], weights: Sequence[float]) -> float:
    """Return the two-sided p-value of the difference between two ratios of sums with the same denominator.

    Such ratios are nats per byte or per token, with `weights` as the denominators of the documents. The p-value
    follows from how often the difference changes sign when documents are resampled. It is at least that of a sign test in which
    all documents agree, because few documents resample to few values.
    """
    difference = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    weight = np.asarray(weights, dtype=np.float64)
    draw = np.random.default_rng(0)
    chunk = max(1, 4_000_000 // len(difference))
    signs = np.zeros(2, dtype=np.int64)
    for done in range(0, RESAMPLES, chunk):
        chosen = draw.integers(len(difference), size=(min(chunk, RESAMPLES - done), len(difference)))
        means = difference[chosen].sum(axis=1) / weight[chosen].sum(axis=1)
        signs += (means <= 0).sum(), (means >= 0).sum()
    return min(1.0, max(2 * (int(signs.min()) + 1) / (RESAMPLES + 1), 2.0 ** (1 - len(difference))))


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
