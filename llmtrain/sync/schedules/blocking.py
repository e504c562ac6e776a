"""Blocking schedule: training stops at the end of a round while replicas synchronize, block by block."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from llmtrain.config import PREFETCH, BlockingSection
from llmtrain.reshard import require_equal
from llmtrain.sync.block_sync import BlockSync, PendingReduction, squared_norm
from llmtrain.sync.edit_penalty import EditPenalty, ReplicaWeights
from llmtrain.sync.schedules.base import BlockTensors, Schedule, ScheduleParts, build_schedule
from llmtrain.sync.sync_stats import RoundStats, average_stats


class BlockingSchedule(Schedule):
    """Blocking synchronization at the end of a round. Replicas agree on their weights once per round, then each
    block is reduced and takes its outer step. While one block is finished, the reductions of the next `prefetch`
    blocks are in flight.

    A synchronization is *armed* from the end of a round until its last block is done. Blocks are synchronized in order.
    """

    computes_while_armed = False
    """True if training continues between blocks, so that the end of a synchronization need not wait for the device."""

    def __init__(self, block_sync: BlockSync, penalty: EditPenalty | None, prefetch: int = PREFETCH):
        super().__init__(block_sync)
        assert block_sync.anchors is not None or penalty is None, "a penalty is on pseudo-gradients: needs an anchor"
        self.penalty, self.prefetch = penalty, prefetch
        self._round = RoundStats()
        self._agreed_round = RoundStats()  # the mean of all replicas' rounds, known once a synchronization has begun
        self._next_block: int | None = None  # of the armed synchronization
        self._replica_weights: ReplicaWeights | None = None
        self._pending: dict[int, PendingReduction] = {}
        self._spread_squared: torch.Tensor | float = 0.0
        self._mean_squared: torch.Tensor | float = 0.0
        self._opened_at = self._closed_at = time.monotonic()

    def end_step(self, step: int, lr: float, ends_round: bool) -> None:
        self._round = self._round.add_step(lr)
        if ends_round:
            self._arm()

    def _arm(self) -> None:
        self._next_block = 0
        self.flush()

    def flush(self) -> None:
        if self._next_block is not None:
            for index in self.block_sync.blocks:
                self._sync_next_block(index)

    def _sync_next_block(self, index: int) -> None:
        """Carry out the part of the armed synchronization that is due before block `index` is used again."""
        assert index == self._next_block, f"block {index} was reached before block {self._next_block}"
        if index == 0:
            self.block_sync.wait_for_device()  # for the local steps: `_open` would count them as exposed
        with self.block_sync.report.time_exposed():
            if index == 0:
                self._open()
            self._prefetch_anchors(index)
            self._sync_block(index)
            self._release(index)
            self._next_block = index + 1
            if self._next_block == len(self.block_sync.blocks):
                self._close()

    def finish(self) -> None:
        if self._round.steps > 0:
            self._next_block = 0
        self.flush()

    @property
    def is_synchronized(self) -> bool:
        return self._round.steps == 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "round": self._round.state(),
            "armed": self._next_block is not None,
            "penalty": self.penalty.state_dict() if self.penalty else None,
        }

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, BlockTensors]) -> None:
        self._round = RoundStats(**state["round"])
        self._next_block = 0 if state["armed"] else None
        if self.penalty is not None:
            self.penalty.load_state_dict(state["penalty"])

    def resharded(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return a state with the old replicas' mean round, as in a synchronization, because rounds of seconds
        differ between replicas."""
        statistics = require_equal([state["penalty"] for state in states])
        return {
            "round": average_stats([RoundStats(**state["round"]) for state in states]).state(),
            "armed": require_equal([state["armed"] for state in states]),
            "penalty": self.penalty.resharded(statistics) if self.penalty is not None else None,
        }

    def _open(self) -> None:
        """Wait for the other replicas. With a penalty, weigh each replica in each block by all replicas' norms."""
        replica_comms, report = self.block_sync.replica_comms, self.block_sync.report
        self._opened_at = time.monotonic()
        done = self._round
        row = torch.tensor(
            [self._opened_at - self._closed_at, done.steps, done.last_lr, done.lr_sum], dtype=torch.float64
        )
        if self.penalty is not None:
            row = torch.cat([row, self._norms()])
        with report.time_waiting():
            gathered = replica_comms.all_gather(row.to(replica_comms.device), "meeting for a synchronization").cpu()
        report.slowest_replica = int(gathered[:, 0].argmax())
        self._agreed_round = RoundStats(*gathered[:, 1:4].mean(0).tolist())
        if self.penalty is not None:
            self._replica_weights = self.penalty.weigh(gathered[:, 4:], gathered[:, 1], gathered[:, 3])
            report.anomalies += int(self._replica_weights.anomalous.sum())
            report.rollbacks += int(self._replica_weights.anomalous.all(0).sum())
            report.longest_exclusion = int(self.penalty.excluded.max())
            names = [block.name for block in self.block_sync.replica.blocks]
            self.block_sync.warnings += self.penalty.check_exclusions(names)
        report.weights_max = (
            float(self._replica_weights.weights.max()) if self._replica_weights else 1 / replica_comms.size
        )
        self._spread_squared = self._mean_squared = 0.0

    def _sync_block(self, index: int) -> None:
        """Finish block `index`. Afterwards its parameters are the next anchor (without anchors, the mean) on every
        replica."""
        block_sync = self.block_sync
        for ahead in block_sync.blocks[index : index + self.prefetch + 1]:
            if ahead not in self._pending and not self._rolls_back(ahead):
                self._pending[ahead] = block_sync.start_reduce(ahead, self._weight(ahead))
        if self._rolls_back(index):
            block_sync.write_parameters(index, block_sync.anchors.load_anchor(index))
            return
        mean = self._pending.pop(index).wait()
        if index + 1 in self._pending:
            self._pending[index + 1].start_second_phase()
        if block_sync.anchors is None:
            self._spread_squared = self._spread_squared + block_sync.squared_spread(index, mean)
            block_sync.write_parameters(index, mean)
            return
        factor = None
        if self.penalty is not None and self.penalty.section.clip is not None:
            # All replicas must find the same factor, but GPUs sum in different orders: hence fp64, rounded at the end.
            squared = block_sync.shard_comms.all_reduce(squared_norm(mean), "norm of a pseudo-gradient").wait()
            factor = self.penalty.clip_factor(squared).to(mean.dtype)
        spread, of_mean = block_sync.outer_step(index, mean, self._agreed_round, factor, measure=True)
        if self._weight(index) > 0:  # else its own pseudo-gradient may contain NaN
            self._spread_squared = self._spread_squared + spread
        self._mean_squared = self._mean_squared + of_mean

    def _prefetch_anchors(self, index: int) -> None:
        """Prefetch offloaded anchors one block before they are sent, and momentum one block before it is used."""
        anchors = self.block_sync.anchors
        if anchors is not None:
            for near in self.block_sync.blocks[index : index + self.prefetch + 2]:
                anchors.prefetch(near, momentum=near <= index + 1)

    def _release(self, index: int) -> None:
        if self.block_sync.anchors is not None:
            self.block_sync.anchors.release(index)

    def _close(self) -> None:
        """Count the round and disarm the synchronization, after the last block."""
        if not self.computes_while_armed:
            self.block_sync.wait_for_device()  # training stands still until the device is done
        self._closed_at = time.monotonic()
        report = self.block_sync.report
        report.count += 1
        report.seconds += self._closed_at - self._opened_at
        report.mean_squared, report.spread_squared = self._mean_squared, self._spread_squared
        self._next_block, self._round = None, RoundStats()

    def _weight(self, index: int) -> float:
        """Return this replica's weight in the block's mean."""
        replica_comms = self.block_sync.replica_comms
        if self._replica_weights is None:
            return 1 / replica_comms.size
        return float(self._replica_weights.weights[replica_comms.rank, index])

    def _norms(self) -> torch.Tensor:
        """Return this replica's pseudo-gradient norm of every block, over all its shards: [blocks], float64. A
        collective of the shard group."""
        visited = self.block_sync.anchors.iter_prefetched(self.block_sync.blocks)
        squares = [self.block_sync.squared_norm(index) for index in visited]
        shard_comms = self.block_sync.shard_comms
        return shard_comms.all_reduce(torch.stack(squares), "norms of pseudo-gradients").wait().sqrt().cpu()

    def _rolls_back(self, index: int) -> bool:
        return self._replica_weights is not None and bool(self._replica_weights.anomalous[:, index].all())


@build_schedule.register
def build_blocking(section: BlockingSection, parts: ScheduleParts) -> BlockingSchedule:
    """Return a blocking schedule with the default prefetch."""
    return BlockingSchedule(parts.block_sync, parts.penalty)
