"""HellaSwag's documents as lm-evaluation-harness prepares them (its tasks/hellaswag/utils.py)."""

from __future__ import annotations

import re
from typing import Any

from datasets import Dataset


def clean(text: str) -> str:
    """Return `text` without the markup of the WikiHow part."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def process_docs(dataset: Dataset) -> Dataset:
    """Return `dataset` with the columns query, choices and gold, made from the original ones."""

    def process(row: dict[str, Any]) -> dict[str, Any]:
        context = row["ctx_a"] + " " + row["ctx_b"].capitalize()
        return {
            "query": clean(row["activity_label"] + ": " + context),
            "choices": [clean(ending) for ending in row["endings"]],
            "gold": int(row["label"]),
        }

    return dataset.map(process)
