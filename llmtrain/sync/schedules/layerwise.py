"""Layer-wise schedule of EDiT (arXiv 2412.07210): the next forward synchronizes each block just before it is used."""

from __future__ import annotations

from llmtrain.errors import RecipeError
from llmtrain.sync.schedules.blocking import BlockingSchedule


class LayerwiseSchedule(BlockingSchedule):
    """Layer-wise synchronization. The end of a round only arms it. The engine's block hook then carries it out in the next
    training forward, so the reductions of later blocks are in flight while earlier blocks compute."""

    def before_block(self, index: int) -> None:
        if self._next_block is not None:
            self._sync_next_block(index)

    def _arm(self) -> None:
        if self._next_block is not None:
            raise RecipeError(
                "the last round was not synchronized, because not all blocks ran in a training forward since; use sync.schedule=blocking"
            )
        self._next_block = 0
