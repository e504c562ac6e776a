"""Exchange in which replicas agree on their weights in some blocks, before these blocks' messages are sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from llmtrain.parallel.comms import PendingCollective
from llmtrain.sync.block_sync import BlockSync
from llmtrain.sync.edit_penalty import EditPenalty
from llmtrain.sync.sync_stats import RoundStats, average_stats


@dataclass(frozen=True)
class Agreement:
    """Result of an exchange. All replicas agree on everything but what is said to be this replica's."""

    since: RoundStats
    """Mean of all replicas' local steps."""
    slowest: int
    """Replica that computed longest."""
    weights: Mapping[int, float]
    """This replica's weight in the mean, by block."""
    excluded: frozenset[int]
    """Blocks in which this replica is anomalous."""
    rolled_back: frozenset[int]
    """Blocks in which all replicas are anomalous: there is no mean, and their parameters return to the anchor."""
    may_clip: frozenset[int] = frozenset()
    """Blocks of which the mean's norm must be computed, because it may exceed the clip."""


class Weighing:
    """Exchange of local steps and, with a penalty, of norms. Without a penalty all replicas have the same weight."""

    def __init__(self, block_sync: BlockSync, penalty: EditPenalty | None):
        assert block_sync.anchors is not None or penalty is None, "a penalty is on pseudo-gradients: needs an anchor"
        self.block_sync, self.penalty = block_sync, penalty

    @property
    def clips(self) -> bool:
        """Return whether means are clipped."""
        return self.penalty is not None and self.penalty.section.clip is not None

    def start(
        self, done: RoundStats, squares: Sequence[torch.Tensor], computed_seconds: float = 0.0
    ) -> PendingCollective:
        """Start gathering every replica's local steps and norms. `squares` has the squared norm of this rank's part of each
        block's pseudo-gradient; without a penalty it is not used. A collective of the shard group and of the replica group."""
        replica_comms, shard_comms = self.block_sync.replica_comms, self.block_sync.shard_comms
        row = torch.tensor([computed_seconds, done.steps, done.last_lr, done.lr_sum], dtype=torch.float64)
        if self.penalty is not None:
            whole = shard_comms.all_reduce(torch.stack(list(squares)), "norms of pseudo-gradients").wait()
            row = torch.cat([row.to(whole.device), whole.sqrt()])
        return replica_comms.gather(row.to(replica_comms.device), "meeting for a synchronization")

    def agree(self, blocks: Sequence[int], gathering: PendingCollective) -> Agreement:
        """Wait for all replicas' rows and return what follows from them for `blocks`, whose squares were given to `start`."""
        replica_comms, report = self.block_sync.replica_comms, self.block_sync.report
        with report.time_waiting():
            gathered = gathering.wait().cpu()
        since = average_stats([RoundStats(*row) for row in gathered[:, 1:4].tolist()])
        slowest = int(gathered[:, 0].argmax())
        if self.penalty is None:
            report.weights_max = 1 / replica_comms.size
            weights = dict.fromkeys(blocks, 1 / replica_comms.size)
            return Agreement(since, slowest, weights, frozenset(), frozenset())
        found = self.penalty.weigh_blocks(blocks, gathered[:, 4:], gathered[:, 1], gathered[:, 3])
        report.anomalies += int(found.anomalous.sum())
        report.rollbacks += int(found.anomalous.all(0).sum())
        report.longest_exclusion = int(self.penalty.excluded.max())
        report.weights_max = float(found.weights.max())
        names = [block.name for block in self.block_sync.replica.blocks]
        self.block_sync.warnings += self.penalty.check_exclusions(names, blocks)
        may_clip = self.penalty.may_clip(gathered[:, 4:], found)
        # Rounded messages may be longer than what they were made from, and have earlier errors in them.
        if self.clips and self.block_sync.wire is not None:
            may_clip = torch.ones_like(may_clip)
        return Agreement(
            since,
            slowest,
            weights=dict(zip(blocks, found.weights[replica_comms.rank].tolist(), strict=True)),
            excluded=_where(blocks, found.anomalous[replica_comms.rank]),
            rolled_back=_where(blocks, found.anomalous.all(0)),
            may_clip=_where(blocks, may_clip),
        )

    def clip_factor(self, squared: torch.Tensor) -> torch.Tensor:
        """Return the factor that clips a block's mean, given the squared norm of this rank's part of it. Requires `clips`.
        A collective of the shard group."""
        # All replicas must find the same factor, but GPUs sum in different orders: hence fp64, rounded by the caller.
        whole = self.block_sync.shard_comms.all_reduce(squared.clone(), "norm of a pseudo-gradient").wait()
        return self.penalty.clip_factor(whole)


def _where(blocks: Sequence[int], flags: torch.Tensor) -> frozenset[int]:
    return frozenset(index for index, flag in zip(blocks, flags.tolist(), strict=True) if flag)
