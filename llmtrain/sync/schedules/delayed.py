"""Delayed schedule of CO2 (arXiv 2401.16265): a round's reduction is in flight during the next round."""

from __future__ import annotations

from typing import Any

from llmtrain.sync.anchors import BlockTensors
from llmtrain.sync.local_steps import LocalSteps
from llmtrain.sync.message import Message
from llmtrain.sync.schedules.fragments import FragmentSchedule


class DelayedSchedule(FragmentSchedule):
    """Delayed synchronization of fragments. At a fragment's turn (with one fragment, at the end of a round), every replica sends
    the fragment's pseudo-gradient, takes the outer step with the mean of the pseudo-gradients sent one turn earlier, and
    continues from the new anchor.

    If the reduction weights replicas, they start to agree on their weights at the turn, and send one step later. In timed rounds,
    replicas wait for each other at the turn anyway, so they agree there and send at once. If all replicas were
    excluded from a block, its anchor does not change."""

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, BlockTensors]) -> None:
        super().load_state_dict(state, tensors)
        # The last turn was that of the fragment with the fewest steps since; of turns at the same step, the last fragment's.
        turns = [(-now.steps, fragment) for fragment, now in enumerate(self._local_steps) if self._messages[fragment]]
        self.staleness = int(self._messages[max(turns)[1]].local_steps.steps) if turns else 0

    def finish(self) -> None:
        with self.block_sync.stats.time_exposed():
            for fragment, local_steps in enumerate(self._local_steps):
                if local_steps.steps > 0:
                    self._take_turn(fragment)
                if (last := self._messages[fragment]) is not None:
                    self._apply(fragment, last, gap=1.0)
                self._messages[fragment] = None

    def _advance(self, fragment: int, message: Message, step: int) -> None:
        # In timed rounds, `_take_turn` has sent the message already, and replicas are at different steps.
        if not self.period.section.is_timed:
            message.advance(int(self._local_steps[fragment].steps), self.period.round_length(step))

    def _take_turn(self, fragment: int) -> None:
        previous = self._messages[fragment]
        if previous is not None:
            previous.complete()  # before the next message, which includes the rounding errors of the previous one, is taken
        self.staleness = int(self._local_steps[fragment].steps)
        taken = self._messages[fragment] = self._take_message(fragment)
        if self.period.section.is_timed:
            taken.send()
        if previous is not None:
            self._apply(fragment, previous, self._staleness_penalty(previous.local_steps, taken.local_steps))
        else:
            self.block_sync.reset_to_anchor(self.fragments[fragment])  # at the first turn, no earlier mean exists

    def _staleness_penalty(self, sent: LocalSteps, now: LocalSteps) -> float:
        """Return the divisor of a late mean: the mean learning rate of its round (`sent`) over that of the current round (`now`),
        but at least 1. Without the gap penalty, the divisor is 1.

        The ratio is of mean rates, not of sums. If a single step followed the last complete round at the end of a run, the ratio of
        the sums would be near the round's length."""
        if not self.section.gap_penalty or now.lr_sum == 0 or sent.steps == 0:
            return 1.0
        return max(1.0, (sent.lr_sum / sent.steps) / (now.lr_sum / now.steps))

    def _apply(self, fragment: int, message: Message, gap: float) -> None:
        message.apply(gap=gap)
        self._count_round(fragment)
