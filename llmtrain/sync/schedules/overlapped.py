"""Overlapped schedule of Streaming DiLoCo (arXiv 2501.18512): fragments synchronize in turn during training."""

from __future__ import annotations

import math
from typing import Any

import torch

from llmtrain.config import OverlappedSection
from llmtrain.sync.block_sync import BlockSync, PendingReduction, squared_norm
from llmtrain.sync.period import Period
from llmtrain.sync.schedules.base import BlockTensors, Schedule, ScheduleParts, build_schedule
from llmtrain.sync.sync_stats import RoundStats


class OverlappedSchedule(Schedule):
    """Overlapped synchronization of P fragments. Fragment p has its turn after ceil((p + 1) H / P) steps of every
    round of H. At its turn a replica sends the fragment's pseudo-gradient. `steps` local steps later it takes the
    outer step and mixes its parameters with the new anchor."""

    def __init__(self, block_sync: BlockSync, period: Period, section: OverlappedSection):
        super().__init__(block_sync)
        self.period, self.section, self.staleness = period, section, section.steps
        self.fragments = section.blocks_of_fragments(len(block_sync.blocks))
        self._local_stats = [RoundStats()] * len(self.fragments)  # local steps since each fragment's last turn
        self._in_flight: list[RoundStats | None] = [None] * len(self.fragments)  # local steps in the message in flight
        self._pending: dict[int, PendingReduction] = {}  # by block
        self._is_mixed = False

    def end_step(self, step: int, lr: float, ends_round: bool) -> None:
        with self.block_sync.report.time_exposed():
            self._local_stats = [since.add_step(lr) for since in self._local_stats]
            for fragment in range(len(self.fragments)):
                self._advance(fragment)
            for fragment in self._fragments_due(step):
                if self._in_flight[fragment] is not None:  # in a short last round: its mean has not been used yet
                    self._apply(fragment)
                self._send(fragment)

    def finish(self) -> None:
        with self.block_sync.report.time_exposed():
            for fragment, sent in enumerate(self._in_flight):
                if sent is not None:
                    self._apply(fragment)
            if not self.is_synchronized:
                self.block_sync.sync_all_blocks(max(self._local_stats, key=lambda since: since.steps))
                self.block_sync.report.count += 1
        self._local_stats = [RoundStats()] * len(self.fragments)
        self._is_mixed = False

    @property
    def is_synchronized(self) -> bool:
        idle = all(sent is None for sent in self._in_flight)
        return idle and not self._is_mixed and not any(since.steps for since in self._local_stats)

    def shared_state(self) -> dict[str, BlockTensors]:
        """Return the means in flight, which a resumed run uses as an uninterrupted run would."""
        means: BlockTensors = [None] * len(self.block_sync.blocks)
        for index in sorted(self._pending):
            means[index] = self._pending[index].wait()
        return {"arriving": means}

    def state_dict(self) -> dict[str, Any]:
        return {
            "since": [since.state() for since in self._local_stats],
            "sent": [sent.state() if sent is not None else None for sent in self._in_flight],
            "mixed": self._is_mixed,
        }

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, BlockTensors]) -> None:
        self._local_stats = [RoundStats(**since) for since in state["since"]]
        self._in_flight = [RoundStats(**sent) if sent is not None else None for sent in state["sent"]]
        self._is_mixed = state["mixed"]
        arrived = self.block_sync.completed
        self._pending = {i: arrived(i, mean) for i, mean in enumerate(tensors["arriving"]) if mean is not None}

    def _fragments_due(self, step: int) -> list[int]:
        place, length = self.period.step_in_round(step), self.period.round_length(step)
        parts = len(self.fragments)
        return [p for p in range(parts) if place == math.ceil((p + 1) * length / parts)]

    def _advance(self, fragment: int) -> None:
        """Advance a message in flight: start its second exchange halfway, apply it after `section.steps` steps."""
        if self._in_flight[fragment] is None:
            return
        steps = self._local_stats[fragment].steps
        if steps == self.section.steps // 2:
            for index in self.fragments[fragment]:
                self._pending[index].start_second_phase()
        if steps == self.section.steps:
            self._apply(fragment)

    def _send(self, fragment: int) -> None:
        for index in self.block_sync.anchors.iter_prefetched(self.fragments[fragment]):
            self._pending[index] = self.block_sync.start_reduce(index)
        self._in_flight[fragment], self._local_stats[fragment] = self._local_stats[fragment], RoundStats()
        if self.section.steps == 0:
            self._apply(fragment)

    def _apply(self, fragment: int) -> None:
        block_sync, report = self.block_sync, self.block_sync.report
        mean_squared: torch.Tensor | float = 0.0
        for index in block_sync.anchors.iter_prefetched(self.fragments[fragment], momentum=True):
            mean = self._pending.pop(index).wait()
            mean_squared = mean_squared + squared_norm(mean)
            block_sync.outer_step(index, mean, self._in_flight[fragment], alpha=self.section.alpha)
        self._in_flight[fragment] = None
        self._is_mixed |= self.section.alpha > 0
        report.mean_squared = mean_squared
        report.weights_max = 1 / block_sync.replica_comms.size
        report.count += fragment == len(self.fragments) - 1


@build_schedule.register
def build_overlapped(section: OverlappedSection, parts: ScheduleParts) -> OverlappedSchedule:
    """Return an overlapped schedule, in which the period sets the fragments' turns."""
    return OverlappedSchedule(parts.block_sync, parts.period, section)
