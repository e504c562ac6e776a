"""Reductions without statistics of earlier rounds: means weighted by tokens, means of directions, and means of pseudo-gradients
rescaled to equal norms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from llmtrain.sync.local_steps import LocalSteps
from llmtrain.sync.reductions.reduction import Reduction, ReplicaWeights


class TokenWeighted(Reduction):
    """Mean weighted by tokens x tokens per step (Decoupled DiLoCo, arXiv 2604.21428). Replicas that train on more tokens, or
    with larger batches, have larger weights. Equal tokens and steps give the plain mean, bit for bit."""

    uses_norms = False

    def weigh_blocks(
        self, blocks: Sequence[int], norms: torch.Tensor, local_steps: Sequence[LocalSteps]
    ) -> ReplicaWeights:
        work = torch.tensor(
            [done.tokens**2 / max(done.steps, 1) for done in local_steps], dtype=torch.float64, device="cpu"
        )
        if not work.any():  # if the end of a run only undoes the mixing of fragments
            work = torch.ones_like(work)
        relative = work / work.max()  # 1, exactly, for equal work
        weights = (relative / relative.sum())[:, None].repeat(1, len(blocks))
        return ReplicaWeights(weights, torch.zeros_like(weights, dtype=torch.bool), _unlimited(len(blocks)))


class Radial(Reduction):
    """Mean direction times mean norm of a block's pseudo-gradients (Decoupled DiLoCo, arXiv 2604.21428). Replicas whose norm is
    not finite are excluded. Replicas that have not moved count in the mean norm only.

    The mean of N directions is lengthened by a factor of at most N. N orthogonal directions need a factor of sqrt(N). If
    directions cancel each other, their mean consists of rounding errors, which a larger factor would amplify. The paper was not
    available to us. We assume that the mean direction is normalized to a unit vector, and that norms are those of blocks, not of
    fragments.
    """

    def __init__(self, replicas: int):
        self.replicas = replicas

    def weigh_blocks(
        self, blocks: Sequence[int], norms: torch.Tensor, local_steps: Sequence[LocalSteps]
    ) -> ReplicaWeights:
        counted, mean_norms = norms.isfinite(), _mean_of_finite(norms)
        moved = counted & (norms > 0)
        # Send directions that are scaled to the mean norm instead of unit vectors, because wire formats are made for values as large
        # as those of pseudo-gradients.
        weights = torch.where(moved, mean_norms / torch.where(moved, norms, 1.0) / moved.sum(0).clamp(min=1), 0.0)
        return ReplicaWeights(weights, ~counted, torch.where(moved.any(0), mean_norms, torch.inf))

    def factor(self, squared_norm: torch.Tensor, target_norm: float) -> torch.Tensor:
        """Return target_norm / ||D||, at most the number of replicas."""
        return (target_norm / squared_norm.sqrt()).clamp(max=self.replicas)


class MedianNorm(Reduction):
    """Mean of pseudo-gradients that are rescaled to the median of their norms, block by block (Covenant-72B, arXiv 2603.08163).
    Replicas whose norm is not finite are excluded.

    The paper rescales pseudo-gradients after sparsification. Here the norms are those of complete pseudo-gradients, because replicas
    exchange norms before they send. Rescaling each block by itself is our choice.
    """

    def weigh_blocks(
        self, blocks: Sequence[int], norms: torch.Tensor, local_steps: Sequence[LocalSteps]
    ) -> ReplicaWeights:
        counted = norms.isfinite()
        ordered, last = norms.masked_fill(~counted, torch.inf).sort(0).values, counted.sum(0).clamp(min=1) - 1
        middle = [ordered.gather(0, place[None])[0] for place in (last // 2, (last + 1) // 2)]
        median = torch.where(counted.any(0), (middle[0] + middle[1]) / 2, 0.0)
        weights = torch.where(counted & (norms > 0), median / torch.where(norms > 0, norms, 1.0) / (last + 1), 0.0)
        return ReplicaWeights(weights, ~counted, _unlimited(len(blocks)))


def _unlimited(blocks: int) -> torch.Tensor:
    return torch.full((blocks,), math.inf, dtype=torch.float64, device="cpu")


def _mean_of_finite(norms: torch.Tensor) -> torch.Tensor:
    """Return each column's mean over its finite entries; 0 if there are none."""
    counted = norms.isfinite()
    return norms.masked_fill(~counted, 0.0).sum(0) / counted.sum(0).clamp(min=1)
