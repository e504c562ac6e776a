"""EDiT's pseudo-gradient penalty: which replicas count in a block's mean, and how much (arXiv 2412.07210).

Everything is computed from the [replicas, blocks] matrix of norms that all ranks have gathered. All ranks make the
same decision, because the computation is in float64 with operations that round alike on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from llmtrain.config import EditPenaltySection
from llmtrain.errors import TrainingError
from llmtrain.running_moments import RunningMoments
from llmtrain.sync.local_steps import LocalSteps
from llmtrain.sync.reductions.reduction import Reduction, ReplicaWeights

EPSILON = 1e-6
WARN_EXCLUSIONS = 5
"""Number of consecutive rounds in which a block of a replica is excluded before a warning names it."""
CLIP_MARGIN = 0.99
"""Share of the clip. If the weighted mean of the replicas' norms is below it, the norm of their mean is below the clip, and is
not computed. The margin of 1 % covers the errors of norms and sums in fp32."""


class EditPenalty(Reduction):
    """Anomaly elimination, softmax weights and clip factor for all blocks of all replicas."""

    def __init__(
        self, section: EditPenaltySection, replicas: int, blocks: int, is_rounded: bool = False, is_mixed: bool = False
    ):
        """Start without statistics. `is_rounded` says that messages are rounded. A mean may then be longer than the
        pseudo-gradients from which it was made. `is_mixed` says that replicas mix the anchor with their own parameters, so that a
        pseudo-gradient is not 0 at the start of a round."""
        self.section, self.is_rounded, self.is_mixed = section, is_rounded, is_mixed
        self.norms = RunningMoments((replicas, blocks), section.ema)
        self.steps = RunningMoments((replicas, blocks), section.ema)
        """Moments of the number of local steps, over the same rounds as `norms`."""
        self.excluded = torch.zeros((replicas, blocks), dtype=torch.int64)
        """Number of consecutive rounds, up to the last one, in which a block of a replica was excluded: [replicas, blocks]."""

    def weigh(self, norms: torch.Tensor, steps: torch.Tensor, lr_sums: torch.Tensor) -> ReplicaWeights:
        """Return the weights for these norms [replicas, blocks] (float64), and update the statistics. `steps` and
        `lr_sums` [replicas] have the number and the summed learning rates of each replica's local steps in the round."""
        scaled_norms = norms
        if self.section.statistics == "adaptive":
            scaled_norms = norms / torch.where(lr_sums > 0, lr_sums, 1.0)[:, None] * self._shortness(steps)
        anomalous = ~norms.isfinite() | self._is_outlier(scaled_norms)
        self.excluded = torch.where(anomalous, self.excluded + 1, 0)
        self._update(scaled_norms, steps, anomalous)
        weights = self._weights(norms, anomalous)
        # If the end of a run only undoes the mixing of fragments, no replica has taken a step.
        if self.section.step_weight > 0 and steps.any():
            share = steps[:, None].expand_as(norms).masked_fill(anomalous, 0.0)
            share = share / share.sum(0).clamp(min=1)
            weights = (1 - self.section.step_weight) * weights + self.section.step_weight * share
        return ReplicaWeights(weights, anomalous, self._target_norms(norms, weights, anomalous))

    def weigh_blocks(
        self, blocks: Sequence[int], norms: torch.Tensor, local_steps: Sequence[LocalSteps]
    ) -> ReplicaWeights:
        """Return the weights in these blocks, and update the statistics of these blocks only, on copies of their columns."""
        part = EditPenalty(self.section, len(norms), len(blocks), self.is_rounded, self.is_mixed)
        for whole, columns in zip(self._statistics(), part._statistics(), strict=True):
            columns.copy_(whole[:, list(blocks)])
        steps = torch.tensor([replica.steps for replica in local_steps], dtype=torch.float64)
        lr_sums = torch.tensor([replica.lr_sum for replica in local_steps], dtype=torch.float64)
        weights = part.weigh(norms, steps, lr_sums)
        for whole, columns in zip(self._statistics(), part._statistics(), strict=True):
            whole[:, list(blocks)] = columns
        return weights

    @property
    def longest_exclusion(self) -> int:
        return int(self.excluded.max())

    def _statistics(self) -> tuple[torch.Tensor, ...]:
        return *self.norms.tensors(), *self.steps.tensors(), self.excluded

    def check_exclusions(self, names: Sequence[str], blocks: Sequence[int]) -> list[str]:
        """Return a warning for each replica whose longest exclusion in these blocks has just reached WARN_EXCLUSIONS rounds in
        a row. `names` has the names of all blocks. Raises TrainingError once it reaches `max_exclusions` rounds in a row."""
        warnings, limit = [], self.section.max_exclusions
        for replica, counts in enumerate(self.excluded.tolist()):
            longest = max(counts[index] for index in blocks)
            named = ", ".join(names[index] for index in blocks if counts[index] == longest)
            what = f"replica {replica}: {named} excluded from the mean {longest} rounds in a row"
            if limit is not None and longest >= limit:
                raise TrainingError(
                    f"{what} (sync.reduction.max_exclusions): norms that stay far above their running mean, or are not finite; "
                    "look at the loss before the first of these rounds, lower optim.lr, or set max_exclusions to null"
                )
            if longest == WARN_EXCLUSIONS:
                warnings.append(f"{what}: pseudo-gradients far larger than before (sync.reduction.z)")
        return warnings

    def _shortness(self, steps: torch.Tensor) -> torch.Tensor:
        """Return the factors [replicas, blocks] by which norms per summed learning rate are multiplied if they were measured
        after fewer steps than usual: sqrt(steps / their running mean), at most 1. In a longer round, steps in changing directions
        cancel each other, so that the norm grows at least with the square root of their number, but not in proportion to it. With
        mixing, the factor is steps / their running mean, because what mixing leaves is as long after few steps as after many."""
        usual = self.steps.mean
        ratio = torch.where(usual > 0, steps[:, None] / usual, 1.0).clamp(max=1)
        return ratio if self.is_mixed else ratio.sqrt()

    def _is_outlier(self, scaled_norms: torch.Tensor) -> torch.Tensor:
        if self.section.z is None:
            return torch.zeros_like(scaled_norms, dtype=torch.bool)
        tested = self.norms.count >= self.section.min_rounds
        if self.section.statistics == "adaptive":
            tested &= self.norms.variance > (EPSILON * self.norms.mean) ** 2  # norms that never varied give no scale
        return tested & (self.norms.z_scores(scaled_norms) > self.section.z)

    def _update(self, scaled_norms: torch.Tensor, steps: torch.Tensor, anomalous: torch.Tensor) -> None:
        """Add the round's norms and steps to the statistics.

        `statistics: paper` does not add an excluded norm. `adaptive` clamps a finite excluded norm to mean + z std 2^(k - 1),
        where k counts the rounds in a row, and adds it. It does not add norms of 0, because a frozen block says nothing about
        the norms that it will have when it moves.
        """
        include = ~anomalous
        if self.section.statistics == "adaptive" and self.section.z is not None:
            reach = self.section.z * self.norms.variance.sqrt() * torch.exp2((self.excluded - 1).double())
            include = scaled_norms.isfinite() & (scaled_norms > 0)
            scaled_norms = torch.where(anomalous, torch.minimum(scaled_norms, self.norms.mean + reach), scaled_norms)
        self.norms.update(scaled_norms.nan_to_num(0.0, 0.0, 0.0), include)
        self.steps.update(steps.double()[:, None].expand_as(include), include)

    def _weights(self, norms: torch.Tensor, anomalous: torch.Tensor) -> torch.Tensor:
        if self.section.temperature is None:
            weights = (~anomalous).double()
            return weights / weights.sum(0).clamp(min=1)
        logits = (-norms / self.section.temperature).masked_fill(anomalous, -torch.inf)
        return logits.softmax(0).masked_fill(anomalous.all(0), 0.0)

    def _target_norms(self, norms: torch.Tensor, weights: torch.Tensor, anomalous: torch.Tensor) -> torch.Tensor:
        """Return the clip for each block whose mean may be longer than it, and infinity for the other blocks, whose means need no
        norm. An unrounded mean is at most as long as the weighted mean of the replicas' norms [replicas, blocks]. In most rounds,
        this bound saves computing the mean's norm, a collective."""
        longest, clip = (weights * norms.masked_fill(anomalous, 0.0)).sum(0), self.section.clip
        if clip is None:
            return torch.full_like(longest, math.inf)
        may_clip = (longest > CLIP_MARGIN * clip) | self.is_rounded
        return torch.full_like(longest, clip).masked_fill(~may_clip, math.inf)

    def factor(self, squared_norm: torch.Tensor, target_norm: float) -> torch.Tensor:
        """Return min(target_norm / (||D|| + 1e-6), 1), where `target_norm` is the clip."""
        return (target_norm / (squared_norm.sqrt() + EPSILON)).clamp(max=1)

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics as plain lists."""
        return {"norms": self.norms.state_dict(), "steps": self.steps.state_dict(), "excluded": self.excluded.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.norms.load_state_dict(state["norms"])
        self.steps.load_state_dict(state["steps"])
        self.excluded = torch.tensor(state["excluded"])

    def resharded(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the statistics for a run that resumes with a different number of replicas. Each new replica starts with the
        merged statistics of all old replicas, and with no earlier exclusions."""
        replicas, blocks = self.norms.count.shape
        before = EditPenalty(self.section, len(state["excluded"]), blocks)
        before.load_state_dict(state)
        merged = {name: getattr(before, name).merge(replicas).state_dict() for name in ("norms", "steps")}
        return {**merged, "excluded": torch.zeros_like(self.excluded).tolist()}
