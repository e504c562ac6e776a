"""Overlapped schedule of Streaming DiLoCo (arXiv 2501.18512): fragments synchronize in turn during training."""

from __future__ import annotations

from typing import Any

from llmtrain.config import OverlappedSection
from llmtrain.sync.anchors import BlockTensors
from llmtrain.sync.local_steps import LocalSteps
from llmtrain.sync.message import Message
from llmtrain.sync.schedules.base import ScheduleParts
from llmtrain.sync.schedules.fragments import FragmentSchedule


class OverlappedSchedule(FragmentSchedule):
    """Overlapped synchronization of fragments. At a fragment's turn, every replica sends the fragment's pseudo-gradient.
    `section.steps` local steps later, it takes the outer step and mixes its parameters with the new anchor.

    If the reduction weights replicas, they start to agree on their weights at the turn, and send one step later. A
    replica that is excluded from a block sets this block to the new anchor, as if alpha were 0, because its own
    parameters may be NaN or far from the anchor."""

    def __init__(self, section: OverlappedSection, parts: ScheduleParts):
        super().__init__(section, parts)
        self.staleness = section.steps
        self._is_mixed = False  # True if parameters may differ between replicas because they were mixed with an anchor

    def finish(self) -> None:
        with self.block_sync.stats.time_exposed():
            for fragment, message in enumerate(self._messages):
                if message is not None:
                    self._apply(fragment)
            has_short_round = False
            for fragment, local_steps in enumerate(self._local_steps):
                if local_steps.steps > 0:
                    has_short_round = True
                    if self.weighing is None:
                        # Few blocks are in flight at once, which takes less memory than a fragment.
                        self.block_sync.sync_blocks(self.fragments[fragment], local_steps)
                        self._local_steps[fragment] = LocalSteps()
                    else:
                        self._take_message(fragment).apply()
                elif self._is_mixed:
                    # No local step since its turn: another outer step would consist only of the mixing and of momentum.
                    self.block_sync.reset_to_anchor(self.fragments[fragment])
            if has_short_round:
                self.block_sync.complete_round()
        self._is_mixed = False

    @property
    def is_synchronized(self) -> bool:
        return super().is_synchronized and not self._is_mixed

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"mixed": self._is_mixed}

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, BlockTensors]) -> None:
        super().load_state_dict(state, tensors)
        self._is_mixed = state["mixed"]

    def _advance(self, fragment: int, message: Message, step: int) -> None:
        age = int(self._local_steps[fragment].steps)
        message.advance(age, self.section.steps)
        if age == self.section.steps:
            self._apply(fragment)

    def _take_turn(self, fragment: int) -> None:
        if self._messages[fragment] is not None:  # in a short last round, the mean of its last turn is still in flight
            self._apply(fragment)
        if self.section.alpha == 0 and self._local_steps[fragment].steps == 0:
            return  # a mean has just replaced all of them: another outer step would consist of momentum only
        self._messages[fragment] = self._take_message(fragment)
        if self.section.steps == 0:
            self._apply(fragment)

    def _apply(self, fragment: int) -> None:
        self._messages[fragment].apply(self.section.alpha)
        self._messages[fragment] = None
        if self.section.alpha == 0:  # this has discarded the local steps since the fragment's turn
            self._local_steps[fragment] = LocalSteps()
        self._is_mixed |= self.section.alpha > 0
        self._count_round(fragment)
