"""Evaluation results of a run, read for its model card."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COUNTS = ("n", "tokens", "bytes")
"""Keys that count what was evaluated and are not scores."""


@dataclass(frozen=True)
class Score:
    """One metric of one task."""

    suite: str
    task: str
    metric: str
    value: float
    stderr: float | None

    def __str__(self) -> str:
        return f"{self.value:.4f}" if self.stderr is None else f"{self.value:.4f} ± {self.stderr:.4f}"


def read_scores(folder: Path, step: int) -> list[Score]:
    """Return the scores of the checkpoint after `step` from the JSON files in `folder`, ordered by file name.

    Files and values of any other form are skipped, because a model card does not need results.
    """
    scores = []
    for file in sorted(folder.glob("*.json")):
        try:
            content = json.loads(file.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and content.get("checkpoint_step") == step:
            scores += _scores_of(str(content.get("suite", file.stem)), content.get("results"))
    return scores


def _scores_of(suite: str, results: Any) -> list[Score]:
    scores = []
    for task, metrics in results.items() if isinstance(results, dict) else ():
        numbers = {
            key: float(value)
            for key, value in (metrics.items() if isinstance(metrics, dict) else ())
            if isinstance(value, int | float) and not isinstance(value, bool) and key not in COUNTS
        }
        for key, value in numbers.items():
            metric, comma, variant = key.partition(",")  # lm-eval's "acc,none"
            if not metric.endswith("_stderr"):
                stderr = numbers.get(f"{metric}_stderr{comma}{variant}", numbers.get(f"{metric}_stderr"))
                scores.append(Score(suite, task, metric, value, stderr))
    return scores
