"""HellaSwag's documents as lm-evaluation-harness prepares them (its tasks/hellaswag/utils.py)."""

from __future__ import annotations

import re
from typing import Any

from datasets import Dataset


def clean(text: str) -> str:
    """Without the marks that the WikiHow part has."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def process_docs(dataset: Dataset) -> Dataset:
    """Columns query, choices and gold from the original ones."""

    def process(row: dict[str, Any]) -> dict[str, Any]:
        context = row["ctx_a"] + " " + row["ctx_b"].capitalize()
        return {
            "query": clean(row["activity_label"] + ": " + context),
            "choices": [clean(ending) for ending in row["endings"]],
            "gold": int(row["label"]),
        }

    return dataset.map(process)
