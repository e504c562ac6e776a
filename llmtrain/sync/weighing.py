"""Weighing: replicas agree on their weights in the means of some blocks before they send these blocks.

Every replica contributes one row of numbers: its seconds, its local steps and the norms of its pseudo-gradients. All ranks
compute the weights of all replicas from the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch

from llmtrain.parallel.collectives import PendingCollective
from llmtrain.sync.block_sync import BlockSync
from llmtrain.sync.local_steps import LocalSteps, mean_local_steps
from llmtrain.sync.reductions.reduction import Reduction

ROUND_VALUES = tuple(entry.name for entry in fields(LocalSteps))
"""Names of the numbers in a row that describe the local steps. They follow the seconds."""


@dataclass(frozen=True)
class Agreement:
    """Result of a weighing. It is the same on all replicas, except for `weights` and `excluded`."""

    local_steps: LocalSteps
    """Mean of all replicas' local steps."""
    slowest: int
    """Replica that took longest to compute. Meaningful only if `start` was given the seconds."""
    weights: Mapping[int, float]
    """This replica's weight in the mean, by block."""
    excluded: frozenset[int]
    """Blocks in which this replica is anomalous."""
    rolled_back: frozenset[int]
    """Blocks in which all replicas are anomalous. They have no mean, and their parameters return to the anchor."""
    target_norms: Mapping[int, float] = field(default_factory=dict)
    """Norm, by block, that the mean must have or must not exceed. The mean of a block without a norm is used as it arrives."""


class Weighing:
    """All-gather of the replicas' local steps and, if the reduction needs them, of norms. The weights follow from
    these. Without a reduction, all replicas have the same weight, and only the mean of their local steps is taken."""

    def __init__(self, block_sync: BlockSync, reduction: Reduction | None):
        assert block_sync.anchors is not None or reduction is None, "pseudo-gradients are weighed: needs an anchor"
        self.block_sync, self.reduction = block_sync, reduction

    @property
    def uses_norms(self) -> bool:
        """Return whether replicas gather the norms of their pseudo-gradients."""
        return self.reduction is not None and self.reduction.uses_norms

    def start(
        self, local_steps: LocalSteps, squares: Sequence[torch.Tensor], computed_seconds: float = 0.0
    ) -> PendingCollective:
        """Start gathering every replica's row. `local_steps` are this rank's. `squares` has the squared norm of this
        rank's part of each block's pseudo-gradient, and is empty unless `uses_norms`. `computed_seconds` is the time
        that this replica took to compute. The result has shape [replicas, 1 + len(ROUND_VALUES) + blocks], float64. A
        collective of the shard group and of the replica group."""
        replica_comms, shard_comms = self.block_sync.replica_comms, self.block_sync.shard_comms
        row = torch.tensor([computed_seconds, *local_steps.state().values()], dtype=torch.float64, device="cpu")
        target = replica_comms.device
        if self.reduction is not None:
            device = squares[0].device if squares else shard_comms.device  # with ZeRO's offload, masters are on the CPU
            tokens = torch.tensor(local_steps.tokens, dtype=torch.float64, device=device)
            sums = shard_comms.all_reduce(torch.stack([tokens, *squares]), "weighing pseudo-gradients")
            row = torch.cat([row.to(sums.device), sums[1:].sqrt()])
            row[1 + ROUND_VALUES.index("tokens")] = sums[0]  # the replica's tokens in place of this rank's
        elif replica_comms.size == 1:
            target = row.device  # the CPU, so the host need not wait for a GPU
        return replica_comms.start_all_gather(row.to(target), "gathering the replicas' local steps")

    def agree(self, blocks: Sequence[int], gathering: PendingCollective) -> Agreement:
        """Wait for all replicas' rows and return the agreement on `blocks`, the blocks whose squared norms `start`
        received. Report the weights and anomalies."""
        replica_comms, stats = self.block_sync.replica_comms, self.block_sync.stats
        with stats.time_waiting():
            gathered = gathering.wait().cpu()
        computed_seconds, counted, norms = gathered.tensor_split((1, 1 + len(ROUND_VALUES)), dim=1)
        replica_steps = [LocalSteps(**dict(zip(ROUND_VALUES, row, strict=True))) for row in counted.tolist()]
        local_steps, slowest = mean_local_steps(replica_steps), int(computed_seconds.argmax())
        if self.reduction is None:
            stats.weights_max = 1 / replica_comms.size
            weights = dict.fromkeys(blocks, 1 / replica_comms.size)
            return Agreement(local_steps, slowest, weights, frozenset(), frozenset())
        found = self.reduction.weigh_blocks(blocks, norms, replica_steps)
        stats.anomalies += int(found.anomalous.sum())
        stats.rollbacks += int(found.anomalous.all(0).sum())
        stats.longest_exclusion = self.reduction.longest_exclusion
        stats.weights_max = float((found.weights / found.weights.sum(0).clamp(min=1.0)).max())
        names = [block.name for block in self.block_sync.replica.blocks]
        self.block_sync.warnings += self.reduction.check_exclusions(names, blocks)
        target_norms = dict(zip(blocks, found.target_norms.tolist(), strict=True))
        return Agreement(
            local_steps,
            slowest,
            weights=dict(zip(blocks, found.weights[replica_comms.rank].tolist(), strict=True)),
            excluded=_where(blocks, found.anomalous[replica_comms.rank]),
            rolled_back=_where(blocks, found.anomalous.all(0)),
            target_norms={index: norm for index, norm in target_norms.items() if math.isfinite(norm)},
        )

    def factor(self, squared: torch.Tensor, target_norm: float) -> torch.Tensor:
        """Return the factor that gives a block's mean the norm `target_norm`, or clips it to that. `squared` is the squared norm
        of this rank's part of the mean. A collective of the shard group."""
        # All replicas must find the same factor, although GPUs may sum in different orders. The sum is therefore in float64,
        # and the caller rounds the factor.
        whole = self.block_sync.shard_comms.all_reduce(squared.clone(), "norm of a pseudo-gradient")
        return self.reduction.factor(whole, target_norm)


def _where(blocks: Sequence[int], flags: torch.Tensor) -> frozenset[int]:
    return frozenset(index for index, flag in zip(blocks, flags.tolist(), strict=True) if flag)
