"""Outer steps of the oracle: their units, their values in each round, and the displacements that they cause."""

from __future__ import annotations

import numpy as np

from llmtrain.config import AverageSection, MomentumSection, NesterovSection, OuterSection, SgdSection


def unit_of(outer: OuterSection, lrs: list[list[float]]) -> float:
    """Return the unit g of a round, given the learning rates of each replica's steps."""
    normalize = getattr(outer, "normalize", "none")
    if normalize == "none":
        return 1.0
    nonzero = [[lr for lr in one if lr != 0] for one in lrs]
    of_replica = {"lr": [one[-1] if one else 0.0 for one in nonzero], "lr_sum": [sum(one) for one in lrs]}
    return float(np.mean(of_replica[normalize]))


def in_round(outer: OuterSection, done: int) -> OuterSection:
    """Return the outer optimizer's section with its values in the round after `done` rounds."""
    if isinstance(outer, AverageSection):
        return outer
    rounds, factor = outer.rounds, 1.0
    if done < rounds.lr_warmup:
        factor = (done + 1) / (rounds.lr_warmup + 1)
    elif rounds.lr_decay:
        factor = np.interp(done - rounds.lr_warmup, [0, rounds.lr_decay], [1.0, rounds.lr_final])
    changes = {"lr": outer.lr * factor}
    if not isinstance(outer, SgdSection) and done < rounds.momentum_warmup:
        changes["momentum"] = outer.momentum * (done + 1) / (rounds.momentum_warmup + 1)
    return outer.model_copy(update=changes)


def displacement_of(
    outer: OuterSection, before: np.ndarray, mean: np.ndarray, g: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return (next momentum, displacement of the anchor), given the momentum before and D = `mean` of a round whose unit is `g`."""
    if g == 0:  # a round whose learning rates are all 0
        return before, outer.lr * mean
    if isinstance(outer, NesterovSection):
        after = outer.momentum * before + mean / g
        return after, outer.lr * (mean + outer.momentum * g * after)
    if isinstance(outer, MomentumSection):
        after = outer.momentum * before + mean / g
        if outer.clip is not None:
            after = np.minimum(np.maximum(after, -outer.clip), outer.clip)
        return after, outer.lr * g * after
    return before, (outer.lr if isinstance(outer, SgdSection) else 1.0) * mean
