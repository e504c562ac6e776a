"""Layer-wise (EDiT, arXiv 2412.07210): the next forward pass synchronizes each block just before it is used."""

from __future__ import annotations

from llmtrain.sync.schedules.blocking import BlockingSchedule


class LayerwiseSchedule(BlockingSchedule):
    """A synchronization that stays armed at the end of a round. The engine's hook carries it out in the next training forward,
    so the reductions of later blocks travel while earlier blocks compute."""

    computes_while_armed = True

    def before_block(self, index: int) -> None:
        if self._next_block is not None:
            self._sync_next_block(index)

    def _arm(self) -> None:
        self._next_block = 0
