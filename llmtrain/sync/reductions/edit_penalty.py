"""EDiT's pseudo-gradient penalty: which replicas count in a block's mean, and how much (arXiv 2412.07210).

Everything is computed from the [replicas, blocks] matrix of norms that all ranks have gathered. All ranks come to the same
result, because the computation is in float64 with operations that round alike on every machine.
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
"""Number of consecutive rounds in which a block of a replica must be excluded before a warning names it."""
CLIP_MARGIN = 0.99
"""Share of the clip below which the weighted mean of the replicas' norms shows that the mean need not be clipped, so that the
mean's norm is not computed. The margin of 1 % covers the errors of norms and sums in fp32."""


class EditPenalty(Reduction):
    """Anomaly elimination, softmax weights and clip factor for all blocks of all replicas."""

    def __init__(
        self, section: EditPenaltySection, replicas: int, blocks: int, is_rounded: bool = False, is_mixed: bool = False
    ):
        """Start without statistics. `is_rounded` says that messages are rounded, so that a mean may be longer than the
        pseudo-gradients from which it was computed. `is_mixed` says that replicas mix the anchor with their own parameters, so that
        a pseudo-gradient is not 0 at the start of a round."""
        self.section, self.is_rounded, self.is_mixed = section, is_rounded, is_mixed
        self.norms = RunningMoments((replicas, blocks), section.ema)
        self.steps = RunningMoments((replicas, blocks), section.ema)
        """Moments of the number of local steps, over the same rounds as `norms`."""
        self.excluded = torch.zeros((replicas, blocks), dtype=torch.int64, device="cpu")
        """Number of consecutive rounds, up to the last one, in which a block of a replica was excluded: [replicas, blocks]."""

    def weigh(self, norms: torch.Tensor, steps: torch.Tensor, lr_sums: torch.Tensor) -> ReplicaWeights:
        """Return the weights for these norms [replicas, blocks] (float64), and update the statistics. `steps` and
        `lr_sums` [replicas] hold the number and the summed learning rates of each replica's local steps in the round."""
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
        """Return the weights in these blocks, and update the statistics of these blocks only. The computation uses copies of their
        columns."""
        part = EditPenalty(self.section, len(norms), len(blocks), self.is_rounded, self.is_mixed)
        for whole, columns in zip(self._statistics(), part._statistics(), strict=True):
            columns.copy_(whole[:, list(blocks)])
        steps = torch.tensor([replica.steps for replica in local_steps], dtype=torch.float64, device="cpu")
        lr_sums = torch.tensor([replica.lr_sum for replica in local_steps], dtype=torch.float64, device="cpu")
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
        """Return a warning for each replica whose longest exclusion in these blocks has just reached WARN_EXCLUSIONS consecutive
        rounds. `names` has the names of all blocks. Raises TrainingError once an exclusion reaches `max_exclusions` consecutive
        rounds."""
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
        """Return the factors [replicas, blocks], at most 1, that lower norms per summed learning rate if a round had fewer steps than
        usual. The factor is sqrt(steps / running mean of steps): steps in changing directions partly cancel each other, so the norm
        grows at least with the square root of their number, but not in proportion to it. With mixing, the factor is
        steps / running mean of steps, because the part of the norm that mixing leaves does not depend on the number of steps."""
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

        With `statistics: paper`, excluded norms are not added. With `adaptive`, a finite excluded norm is added, but limited to
        mean + z std 2^(k - 1) in the k-th consecutive round of its exclusion. Norms of 0 are not added, because a frozen block says
        nothing about the norms that it will have when it moves.
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
        """Return the clip for each block whose mean may be longer than the clip, and infinity for the other blocks. The norm of an
        unrounded mean is at most the weighted mean of the replicas' norms [replicas, blocks]. In most rounds, this bound saves the
        collective that computes the mean's norm."""
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
        self.excluded = torch.tensor(state["excluded"], device="cpu")

    def resharded(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the statistics for a run that resumes with a different number of replicas. Each new replica starts with the
        merged statistics of all old replicas and without earlier exclusions."""
        replicas, blocks = self.norms.count.shape
        before = EditPenalty(self.section, len(state["excluded"]), blocks)
        before.load_state_dict(state)
        merged = {name: getattr(before, name).merge(replicas).state_dict() for name in ("norms", "steps")}
        return {**merged, "excluded": torch.zeros_like(self.excluded).tolist()}
