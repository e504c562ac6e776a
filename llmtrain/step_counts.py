"""Numbers of synchronous steps, local steps and rounds in the run of a recipe."""

from __future__ import annotations

from llmtrain.config import Recipe
from llmtrain.lr import LRSchedule
from llmtrain.sync.period import build_period, warmup_of


def warmup_steps(recipe: Recipe) -> int:
    """Return the number of synchronous steps that `sync.warmup_steps` and `sync.warmup_until_lr` ask for."""
    return warmup_of(recipe.sync, LRSchedule.of(recipe))


def local_steps(recipe: Recipe) -> int:
    """Return the number of steps that average no gradients over the replicas."""
    if recipe.sync.period.averages_gradients:
        return 0
    return max(0, recipe.train.total_steps - warmup_steps(recipe))


def round_count(recipe: Recipe) -> int:
    """Return the number of rounds, at least 1, of a run whose period is a number of local steps."""
    period = build_period(recipe.sync.period, warmup_steps(recipe), LRSchedule.of(recipe))
    return max(1, period.round_number(recipe.train.total_steps))
