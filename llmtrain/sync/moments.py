"""Averages of the inner optimizer's moments over the replicas, each at the end of every so many rounds (DES-LOC)."""

from __future__ import annotations

from typing import Any

import torch

from llmtrain.config import PREFETCH, MomentsSection
from llmtrain.errors import RecipeError
from llmtrain.parallel.comms import Comms, PendingCollective
from llmtrain.parallel.engine import Replica
from llmtrain.parallel.optimizers import MOMENTS
from llmtrain.sync.sync_stats import SyncStats


class MomentAverages:
    """Blocking averages of first and second moments, block by block, in the precision in which they are kept."""

    def __init__(self, section: MomentsSection, replica: Replica, replica_comms: Comms, report: SyncStats):
        self.section, self.replica, self.replica_comms, self.report = section, replica, replica_comms, report
        self._rounds = 0

    def end_round(self) -> None:
        """Count a round, and average the moments that are due. A collective of the replica group."""
        self._rounds += 1
        # Second moments first: first moments are averaged where there are second ones.
        for order, every in ((2, self.section.second), (1, self.section.first)):
            if every is not None and self._rounds % every == 0:
                with self.report.time_exposed():
                    self._average(order)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rounds so far."""
        return {"rounds": self._rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rounds = state["rounds"]

    def _average(self, order: int) -> None:
        blocks = range(len(self.replica.blocks))
        if all(moment is None for index in blocks for moment in self.replica.moments(index, order)):
            which, key = ("first", "second")[order - 1], ", ".join(MOMENTS[order])
            raise RecipeError(
                f"sync.moments.{which} averages {which} moments, but the optimizer has none ({key}); use another one, or null"
            )
        in_flight = {index: self._start(index, order) for index in blocks[: PREFETCH + 1]}
        for index in blocks:
            if (pending := in_flight.pop(index)) is not None:
                self._install(index, order, pending.wait())
            if (ahead := index + PREFETCH + 1) < len(blocks):
                in_flight[ahead] = self._start(ahead, order)

    def _start(self, index: int, order: int) -> PendingCollective | None:
        """Start averaging a block's moments; None for a block without any, on all replicas."""
        parts = [moment.reshape(-1) for moment in self.replica.moments(index, order) if moment is not None]
        if not parts:
            return None
        message = torch.cat(parts).div_(self.replica_comms.size)
        return self.replica_comms.all_reduce(message, f"averaging moments of {self.replica.blocks[index].name}")

    def _install(self, index: int, order: int, mean: torch.Tensor) -> None:
        moments = self.replica.moments(index, order)
        parts = iter(mean.split([moment.numel() for moment in moments if moment is not None]))
        for moment, second in zip(moments, self.replica.moments(index, 2), strict=True):
            if moment is None:
                continue
            moment.copy_(next(parts).view(moment.shape))
            if order == 1 and second is not None:
                # A replica that has not met a token has no second moment of its row, and would divide by epsilon.
                moment.masked_fill_(second == 0, 0.0)
