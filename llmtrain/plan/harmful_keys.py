"""Warnings about values of a recipe that made runs worse in the study of benchmarks/study. Training is possible with each."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.config import MomentumSection, NesterovSection, Recipe
from llmtrain.lr import LRSchedule
from llmtrain.sync.period import warmup_of

SEVERAL = 6
"""Minimum number of rounds, as a multiple of those that the outer momentum covers. In runs of 26 rounds of 30 steps, DiLoCo with an
outer learning rate of 0.7 and momentum 0.8 ended 6 % higher than with a warm-up of the momentum over 4 rounds, and in runs
of 7 rounds DiLoCo and EDiT with their presets 3 to 13 % (benchmarks/results/study); in 13 rounds of 20, EDiT 3 %."""
LARGE, LARGE_LR = 0.8, 0.7
"""Smallest momentum and learning rate that were tested without a warm-up and overshot; 0.5 and 0.4 did not."""


def harmful_keys(recipe: Recipe) -> list[str]:
    """Return a line for each value that makes a run like this one worse, with a better value."""
    return [*_early_momentum(recipe)]


def _early_momentum(recipe: Recipe) -> Iterator[str]:
    """Yield a line if the outer momentum is there from the first round of a short run."""
    sync, outer = recipe.sync, recipe.sync.outer
    if not isinstance(outer, NesterovSection | MomentumSection) or not sync.period.min_length:
        return
    local = recipe.train.total_steps - warmup_of(sync, LRSchedule.of(recipe))
    rounds, covered = local // sync.period.min_length, 1 / (1 - outer.momentum)
    is_tested = outer.momentum >= LARGE and outer.lr >= LARGE_LR and recipe.parallel.replicas != 1
    if is_tested and 1 < rounds < SEVERAL * covered and not outer.rounds.momentum_warmup:
        yield (
            f"sync.outer.momentum is {outer.momentum:g}, an average over {covered:.0f} rounds, from the first of about {rounds:,} "
            f"rounds: so short a run ends lower with sync.outer=auto, or with sync.outer.rounds.momentum_warmup={max(1, rounds // 6)}"
        )
