"""Schedules that synchronize all blocks in order, at the end of a round or in the forward that follows it.

The end of a round *arms* a synchronization, which stays armed until its last block is done. `BlockingSchedule` carries the
synchronization out at once, while training waits. `LayerwiseSchedule` leaves it to the next training forward, in which the engine's
block hook synchronizes each block just before it is used. `flush` carries out an armed synchronization without a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from llmtrain.config import SyncScheduleSection
from llmtrain.errors import RecipeError
from llmtrain.reshard import require_equal
from llmtrain.sync.anchors import BlockTensors
from llmtrain.sync.block_sync import BlockSquares, PendingReduction, squared_norm
from llmtrain.sync.local_steps import LocalSteps, mean_local_steps
from llmtrain.sync.reductions.reduction import STATE_KEY
from llmtrain.sync.schedules.base import Schedule, ScheduleParts
from llmtrain.sync.weighing import Agreement, Weighing
from llmtrain.turns import own_time


class BlockingSchedule(Schedule):
    """Blocking synchronization at the end of a round. Replicas agree on their weights once per round, then each
    block is reduced and takes its outer step. While a block takes its outer step, the reductions of the next `prefetch`
    blocks are in flight.
    """

    def __init__(self, section: SyncScheduleSection, parts: ScheduleParts):
        super().__init__(section, parts)
        self.reduction, self.prefetch = parts.reduction, section.blocks_in_flight - 1
        self._weighing = Weighing(self.block_sync, self.reduction)
        self._round = LocalSteps()  # local steps since the last synchronization
        # Next block to synchronize while a synchronization is armed; None otherwise.
        self._next_block: int | None = None
        # During a synchronization: agreed weights, reductions in flight by block, and sums over the blocks done so far.
        self._agreement: Agreement | None = None
        self._pending: dict[int, PendingReduction] = {}
        self._spread_squared: torch.Tensor | float = 0.0
        self._mean_squared: torch.Tensor | float = 0.0
        self._opened_at = self._closed_at = own_time()  # start and end of the last synchronization

    def end_step(self, step: int, lr: float, ends_round: bool, tokens: float = 0) -> None:
        self._round = self._round.add_step(lr, tokens)
        if ends_round:
            self._arm()

    def forget_tokens(self) -> None:
        self._round = replace(self._round, tokens=0)

    def _arm(self) -> None:
        """Start a synchronization, at the end of a round."""
        self._next_block = 0
        self.flush()

    def flush(self) -> None:
        if self._next_block is not None:
            for index in self.block_sync.blocks:
                self._sync_next_block(index)

    def _sync_next_block(self, index: int) -> None:
        """Carry out the part of the armed synchronization that is due before block `index` is used again."""
        if index != self._next_block:
            names = [block.name for block in self.block_sync.replica.blocks]
            raise RecipeError(
                f"{names[index]} runs before {names[self._next_block]} in this forward pass, but with sync.schedule=layerwise each block "
                "must run once, in order, in every training forward; use sync.schedule=blocking"
            )
        if index == 0:
            self.block_sync.wait_for_device()  # or `_begin_synchronization` would count the time of local steps as exposed
        with self.block_sync.stats.time_exposed():
            if index == 0:
                self._begin_synchronization()
            self._prefetch_anchors(index)
            self._sync_block(index)
            if self.block_sync.anchors is not None:
                self.block_sync.anchors.release(index)
            self._next_block = index + 1
            if self._next_block == len(self.block_sync.blocks):
                self._end_synchronization()

    def finish(self) -> None:
        if self._round.steps > 0:
            self._next_block = 0
        self.flush()

    @property
    def is_armed(self) -> bool:
        return self._next_block is not None

    @property
    def is_synchronized(self) -> bool:
        return self._round.steps == 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "round": self._round.state(),
            "armed": self._next_block is not None,
            STATE_KEY: self.reduction.state_dict() if self.reduction is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, BlockTensors]) -> None:
        self._round = LocalSteps(**state["round"])
        self._next_block = 0 if state["armed"] else None
        if self.reduction is not None:
            self.reduction.load_state_dict(state[STATE_KEY])

    def resharded(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return one state for all new replicas. Its round is the mean of the old replicas' rounds, which differ in timed rounds.
        A synchronization uses the same mean."""
        statistics = require_equal([state[STATE_KEY] for state in states])
        return {
            "round": mean_local_steps([LocalSteps(**state["round"]) for state in states]).state(),
            "armed": require_equal([state["armed"] for state in states]),
            STATE_KEY: self.reduction.resharded(statistics) if self.reduction is not None else None,
        }

    def _begin_synchronization(self) -> None:
        """Wait for the other replicas and gather their local steps. With a reduction that weights replicas, also agree on the weights
        in all blocks."""
        block_sync = self.block_sync
        self._opened_at = own_time()
        computed_seconds = self._opened_at - self._closed_at
        gathering = self._weighing.start(self._round, self._squared_norms(), computed_seconds)
        self._agreement = self._weighing.agree(block_sync.blocks, gathering)
        block_sync.stats.slowest_replica = self._agreement.slowest
        self._spread_squared = self._mean_squared = 0.0

    def _sync_block(self, index: int) -> None:
        """Start the reductions that are due, and finish block `index`. Afterwards, all replicas hold the same parameters in this
        block: those from which the outer optimizer continues or, without anchors, the mean."""
        block_sync, agreed = self.block_sync, self._agreement
        for ahead in block_sync.blocks[index : index + self.prefetch + 1]:
            if ahead not in self._pending and ahead not in agreed.rolled_back:
                self._pending[ahead] = block_sync.start_reduce(ahead, agreed.weights[ahead])
        if index in agreed.rolled_back:
            block_sync.reset_to_anchor([index])
            return
        for near in (index, index + 1):  # the next block's first phase arrives before this one's second
            if near in self._pending:
                self._pending[near].start_second_phase()
        mean = self._pending.pop(index).wait()
        if block_sync.anchors is None:
            self._spread_squared = self._spread_squared + block_sync.squared_spread(index, mean)
            block_sync.write_parameters(index, mean)
            return
        factor = None
        if index in agreed.target_norms:
            factor = self._weighing.factor(squared_norm(mean), agreed.target_norms[index]).to(mean.dtype)
        squares = BlockSquares()
        block_sync.outer_step(index, mean, agreed.local_steps, factor, squares=squares)
        if agreed.weights[index] > 0:  # an excluded replica's own pseudo-gradient may contain NaN
            self._spread_squared = self._spread_squared + squares.distance
        self._mean_squared = self._mean_squared + squares.mean

    def _prefetch_anchors(self, index: int) -> None:
        """Prefetch offloaded anchors one block before their pseudo-gradients are sent, and the outer optimizer's state one block
        before it is used."""
        anchors = self.block_sync.anchors
        if anchors is not None:
            for near in self.block_sync.blocks[index : index + self.prefetch + 2]:
                anchors.prefetch(near, with_state=near <= index + 1)

    def _end_synchronization(self) -> None:
        """Count the round and disarm the synchronization, after the last block."""
        # Training waits until the device is done, except if the synchronization is part of a forward, which continues.
        if not self.section.syncs_in_forward:
            self.block_sync.wait_for_device()
        self._closed_at = own_time()
        self.block_sync.complete_round()
        stats = self.block_sync.stats
        stats.seconds += self._closed_at - self._opened_at
        stats.mean_squared, stats.spread_squared = self._mean_squared, self._spread_squared
        self._next_block, self._round = None, LocalSteps()

    def _squared_norms(self) -> list[torch.Tensor]:
        """Return the squared norms of this rank's parts of all blocks' pseudo-gradients; an empty list if the reduction needs no
        norms."""
        if not self._weighing.uses_norms:
            return []
        visited = self.block_sync.anchors.iter_prefetched(self.block_sync.blocks)
        return [self.block_sync.squared_norm(index) for index in visited]


class LayerwiseSchedule(BlockingSchedule):
    """Layer-wise synchronization of EDiT (arXiv 2412.07210). The reductions of later blocks are in flight while earlier blocks
    compute."""

    def _arm(self) -> None:
        if self._next_block is not None:
            raise RecipeError(
                "the last round was not synchronized, because not all blocks ran in a training forward since; use sync.schedule=blocking"
            )
        self._next_block = 0

    def before_block(self, index: int) -> None:
        if self._next_block is not None:
            self._sync_next_block(index)
