"""Warnings about values of a recipe that made runs worse in the study of benchmarks/study. Training is possible with each."""

from __future__ import annotations

from collections.abc import Iterator

from llmtrain.config import MomentumSection, NesterovSection, Recipe
from llmtrain.lr import LRSchedule
from llmtrain.sync.period import warmup_of

FEW = 30
"""Rounds up to which the warning was tested: in 26 rounds of 30 steps (one seed), DiLoCo with an outer learning rate of 0.7 and momentum
0.8 ended 6 % higher than with a warm-up of the momentum over four rounds, and in 7 rounds DiLoCo and EDiT with their
presets 11 and 13 % (benchmarks/results/study); in 13 rounds of 20, EDiT 3 %. With Muon, 7 rounds show no difference."""
LARGE, LARGE_LR = 0.8, 0.7
"""Smallest momentum and learning rate with which it was. With a learning rate of 0.4, the warm-up changed less than 0.02."""


def harmful_keys(recipe: Recipe) -> list[str]:
    """Return a line for each value that makes a run like this one worse, with a better value."""
    return [*_early_momentum(recipe)]


def _early_momentum(recipe: Recipe) -> Iterator[str]:
    """Yield a line if the outer momentum is there from the first round of a short run."""
    sync, outer = recipe.sync, recipe.sync.outer
    if not isinstance(outer, NesterovSection | MomentumSection) or not sync.period.min_length:
        return
    local = recipe.train.total_steps - warmup_of(sync, LRSchedule.of(recipe))
    rounds = local // sync.period.min_length
    is_tested = outer.momentum >= LARGE and outer.lr >= LARGE_LR and recipe.optim.kind == "adamw"
    if is_tested and recipe.parallel.replicas != 1 and 1 < rounds <= FEW and not outer.rounds.momentum_warmup:
        yield (
            f"sync.outer.momentum is {outer.momentum:g} from the first of about {rounds} rounds: so short a run ended lower in tests with "
            f"sync.outer.rounds.momentum_warmup={max(1, rounds // 6)}"
        )
