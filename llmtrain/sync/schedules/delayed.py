"""Delayed schedule of CO2 (arXiv 2401.16265): a round's reduction is in flight during the next round."""

from __future__ import annotations

from typing import Any

import torch

from llmtrain.config import DelayedSection
from llmtrain.sync.block_sync import BlockSync, PendingReduction, squared_norm
from llmtrain.sync.schedules.base import BlockTensors, Schedule, ScheduleParts, build_schedule
from llmtrain.sync.sync_stats import RoundStats


class DelayedSchedule(Schedule):
    """Delayed synchronization. At a round's end, a replica sends its pseudo-gradient and takes the outer step with
    the mean of the round before. It starts the next round from the new anchor."""

    def __init__(self, block_sync: BlockSync, section: DelayedSection):
        super().__init__(block_sync)
        self.section = section
        self._round = RoundStats()
        self._in_flight: RoundStats | None = None
        self._pending: list[PendingReduction] = []

    def end_step(self, step: int, lr: float, ends_round: bool) -> None:
        self._round = self._round.add_step(lr)
        if ends_round:
            with self.block_sync.report.time_exposed():
                self._end_round()

    def finish(self) -> None:
        with self.block_sync.report.time_exposed():
            if self._round.steps > 0:
                self._end_round()
            if self._in_flight is not None:
                self._apply(self._pending, self._in_flight, gap=1.0)
                self._in_flight, self._pending = None, []

    @property
    def is_synchronized(self) -> bool:
        """Return whether all replicas are at the anchor and nothing is in flight."""
        return self._round.steps == 0 and self._in_flight is None

    def shared_state(self) -> dict[str, BlockTensors]:
        """Return the means in flight, which a resumed run uses as an uninterrupted run would."""
        return {"arriving": means(self._pending)}

    def state_dict(self) -> dict[str, Any]:
        return {"round": self._round.state(), "sent": self._in_flight.state() if self._in_flight is not None else None}

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, BlockTensors]) -> None:
        self._round = RoundStats(**state["round"])
        self._in_flight = RoundStats(**state["sent"]) if state["sent"] is not None else None
        arriving = tensors["arriving"] if self._in_flight is not None else []
        self._pending = [self.block_sync.completed(i, mean) for i, mean in enumerate(arriving)]

    def _end_round(self) -> None:
        means(self._pending)  # before the next messages, which include the rounding errors of these
        visited, done = self.block_sync.anchors.iter_prefetched(self.block_sync.blocks), self._round
        sent = [self.block_sync.start_reduce(index) for index in visited]
        self.staleness = int(done.steps)
        if self._in_flight is not None:
            self._apply(self._pending, self._in_flight, self._staleness_penalty(self._in_flight, done))
        else:
            self.block_sync.reset_to_anchor()  # no mean has arrived yet
        self._pending, self._in_flight = sent, done
        self._round = RoundStats()

    def _staleness_penalty(self, sent: RoundStats, now: RoundStats) -> float:
        """Return the divisor of a late mean: its round's summed learning rates over those of the current round, at
        least 1. Without the gap penalty it is 1."""
        return max(1.0, sent.lr_sum / now.lr_sum) if self.section.gap_penalty and now.lr_sum > 0 else 1.0

    def _apply(self, reductions: list[PendingReduction], since: RoundStats, gap: float) -> None:
        block_sync, report = self.block_sync, self.block_sync.report
        mean_squared: torch.Tensor | float = 0.0
        arrived = means(reductions)
        for index in block_sync.anchors.iter_prefetched(block_sync.blocks, momentum=True):
            mean_squared = mean_squared + squared_norm(arrived[index])
            block_sync.outer_step(index, arrived[index], since, None if gap == 1.0 else 1 / gap)
        report.mean_squared, report.weights_max = mean_squared, 1 / block_sync.replica_comms.size
        report.count += 1


@build_schedule.register
def build_delayed(section: DelayedSection, parts: ScheduleParts) -> DelayedSchedule:
    """Return a delayed schedule, with the gap penalty if the section has it."""
    return DelayedSchedule(parts.block_sync, section)


def means(reductions: list[PendingReduction]) -> list[torch.Tensor]:
    """Wait for all reductions and return their means. The second exchanges of a quantized wire run concurrently."""
    for reduction in reductions:
        reduction.start_second_phase()
    return [reduction.wait() for reduction in reductions]
