"""Streaming DiLoCo (arXiv 2501.18512): fragments of the model synchronise in turn while training goes on."""

from __future__ import annotations

import math
from typing import Any

import torch

from llmtrain.config import Overlapped as OverlappedSection
from llmtrain.sync.period import Period
from llmtrain.sync.round import Round
from llmtrain.sync.schedules.schedule import ByBlock, Schedule
from llmtrain.sync.synchroniser import Reduction, Synchroniser


def fragments_of(section: OverlappedSection, blocks: int) -> list[list[int]]:
    """Which blocks belong to each fragment, in forward order."""
    if section.pattern == "strided":
        return [list(range(first, blocks, section.fragments)) for first in range(section.fragments)]
    ends = [blocks * (fragment + 1) // section.fragments for fragment in range(section.fragments)]
    return [list(range(first, end)) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


class Overlapped(Schedule):
    """Fragment p of P has its turn after ceil((p + 1) H / P) steps of every round of H. At its turn it sends its
    pseudo-gradient; `steps` later the outer step is taken and the replica's parameters mixed with the new anchor."""

    def __init__(self, synchroniser: Synchroniser, period: Period, section: OverlappedSection):
        super().__init__(synchroniser)
        self.period, self.section, self.staleness = period, section, section.steps
        self.fragments = fragments_of(section, len(synchroniser.blocks))
        self._since = [Round()] * len(self.fragments)  # local steps since each fragment's last turn
        self._sent: list[Round | None] = [None] * len(self.fragments)  # those of the message under way
        self._under_way: dict[int, Reduction] = {}  # by block
        self._is_mixed = False

    def end_step(self, step: int, lr: float, ends_round: bool) -> None:
        with self.synchroniser.report.exposed():
            self._since = [since.then(lr) for since in self._since]
            for fragment in range(len(self.fragments)):
                self._watch(fragment)
            for fragment in self._whose_turn(step):
                if self._sent[fragment] is not None:  # a short last round: its turn comes before its mean was used
                    self._use(fragment)
                self._send(fragment)

    def finish(self) -> None:
        with self.synchroniser.report.exposed():
            for fragment, sent in enumerate(self._sent):
                if sent is not None:
                    self._use(fragment)
            if not self.is_synchronised:
                self.synchroniser.together(max(self._since, key=lambda since: since.steps))
                self.synchroniser.report.count += 1
        self._since = [Round()] * len(self.fragments)
        self._is_mixed = False

    @property
    def is_synchronised(self) -> bool:
        idle = all(sent is None for sent in self._sent)
        return idle and not self._is_mixed and not any(since.steps for since in self._since)

    def shared_tensors(self) -> dict[str, ByBlock]:
        """What has been sent will be used after a restart as it would have been: its mean is state."""
        means: ByBlock = [None] * len(self.synchroniser.blocks)
        for index in sorted(self._under_way):
            means[index] = self._under_way[index].wait()
        return {"arriving": means}

    def state_dict(self) -> dict[str, Any]:
        return {
            "since": [since.state() for since in self._since],
            "sent": [sent.state() if sent is not None else None for sent in self._sent],
            "mixed": self._is_mixed,
        }

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, ByBlock]) -> None:
        self._since = [Round(**since) for since in state["since"]]
        self._sent = [Round(**sent) if sent is not None else None for sent in state["sent"]]
        self._is_mixed = state["mixed"]
        arrived = self.synchroniser.arrived
        self._under_way = {i: arrived(i, mean) for i, mean in enumerate(tensors["arriving"]) if mean is not None}

    def _whose_turn(self, step: int) -> list[int]:
        place, length = self.period.place(step), self.period.length(step)
        parts = len(self.fragments)
        return [p for p in range(parts) if place == math.ceil((p + 1) * length / parts)]

    def _watch(self, fragment: int) -> None:
        """Move a message under way on: its second exchange halfway, its use when its steps have passed."""
        if self._sent[fragment] is None:
            return
        steps = self._since[fragment].steps
        if steps == self.section.steps // 2:
            for index in self.fragments[fragment]:
                self._under_way[index].proceed()
        if steps == self.section.steps:
            self._use(fragment)

    def _send(self, fragment: int) -> None:
        for index in self.synchroniser.anchors.visit(self.fragments[fragment]):
            self._under_way[index] = self.synchroniser.send(index)
        self._sent[fragment], self._since[fragment] = self._since[fragment], Round()
        if self.section.steps == 0:
            self._use(fragment)

    def _use(self, fragment: int) -> None:
        synchroniser, report = self.synchroniser, self.synchroniser.report
        mean_squared: torch.Tensor | float = 0.0
        for index in synchroniser.anchors.visit(self.fragments[fragment], momentum=True):
            mean = self._under_way.pop(index).wait()
            mean_squared = mean_squared + mean.square().sum()
            anchor = synchroniser.step(index, mean, self._sent[fragment])
            synchroniser.install(index, anchor, self.section.mix)
        self._sent[fragment] = None
        self._is_mixed |= self.section.mix > 0
        report.mean_squared = mean_squared
        report.weights_max = 1 / synchroniser.replica.size
        report.count += fragment == len(self.fragments) - 1
