"""Interface of the reductions that weight replicas: they choose each replica's weight in a block's mean, and the mean's norm.

Everything is computed from the local steps and from the [replicas, blocks] matrix of norms that all ranks have gathered, in
float64 with operations that round alike on every machine. All ranks therefore compute the same weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from llmtrain.sync.local_steps import LocalSteps

STATE_KEY = "penalty"
"""Key of a reduction's state in a schedule's state. The name is from the time when EDiT's penalty was the only reduction, and stays
because checkpoints contain it."""


@dataclass(frozen=True)
class ReplicaWeights:
    """Weights, anomalies and target norms computed from one round."""

    weights: torch.Tensor
    """[replicas, blocks], float64: the factor of each pseudo-gradient in the sum that forms a block's mean. If all replicas are
    anomalous in a block, all of its weights are 0, and it has no mean."""
    anomalous: torch.Tensor
    """[replicas, blocks], bool: True for replicas that are excluded from a block's mean."""
    target_norms: torch.Tensor
    """[blocks], float64: the norm that a mean must have or must not exceed; infinite if the mean is used as it arrives."""


@dataclass(frozen=True)
class ReductionParts:
    """Facts about a run from which reductions are built. Each reduction takes those that it needs."""

    replicas: int
    blocks: int
    is_rounded: bool
    """True if messages are rounded, so that replicas receive an inexact mean."""
    is_mixed: bool
    """True if replicas mix the anchor with their own parameters after a synchronization."""


class Reduction(ABC):
    """Reduction that weights replicas. Subclasses may keep statistics of earlier rounds."""

    uses_norms = True
    """True if the weights depend on the norms of the pseudo-gradients."""
    longest_exclusion = 0
    """Largest number, over replicas and blocks, of consecutive rounds up to the last one in which a block was excluded."""

    @abstractmethod
    def weigh_blocks(
        self, blocks: Sequence[int], norms: torch.Tensor, local_steps: Sequence[LocalSteps]
    ) -> ReplicaWeights:
        """Return the weights in these blocks, and update the statistics. `norms` [replicas, len(blocks)], float64, holds the norms of
        the replicas' pseudo-gradients; it is [replicas, 0] without `uses_norms`. `local_steps` has one entry per replica."""

    def factor(self, squared_norm: torch.Tensor, target_norm: float) -> torch.Tensor:
        """Return the factor by which a block's mean D is multiplied, a float64 scalar. `squared_norm` is ||D||^2 over all
        shards, and `target_norm` the block's entry of `ReplicaWeights.target_norms`."""
        return torch.ones_like(squared_norm)

    def check_exclusions(self, names: Sequence[str], blocks: Sequence[int]) -> list[str]:
        """Return warnings about replicas that are excluded from these blocks. `names` has the names of all blocks. Raises
        TrainingError if a replica has been excluded for too long."""
        return []

    def state_dict(self) -> dict[str, Any] | None:
        """Return the statistics as plain values; None if there are none."""
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore what `state_dict` returned."""

    def resharded(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the statistics for a run that resumes with a different number of replicas."""
        return None
