"""All warnings about the values of a recipe."""

from __future__ import annotations

from collections.abc import Mapping

from llmtrain.config import Recipe
from llmtrain.data.dataset import TokenDataset
from llmtrain.plan.harmful_keys import harmful_keys
from llmtrain.plan.ineffective_keys import ineffective_keys


def recipe_warnings(recipe: Recipe, texts: Mapping[str, TokenDataset], step_seconds: float | None) -> list[str]:
    """Return a line for each value that has less effect than it seems to have, and for each that makes the run worse. The
    arguments are those of `ineffective_keys`."""
    return [*ineffective_keys(recipe, texts, step_seconds), *harmful_keys(recipe)]
