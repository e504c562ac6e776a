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
        for order, every in ((1, self.section.first), (2, self.section.second)):
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
        if not any(self.replica.moments(index, order) for index in blocks):
            which, key = ("first", "second")[order - 1], ", ".join(MOMENTS[order])
            raise RecipeError(
                f"sync.moments.{which} averages {which} moments, but the optimizer has none ({key}); use another one, or null"
            )
        in_flight = {index: self._start(index, order) for index in blocks[: PREFETCH + 1]}
        for index in blocks:
            parts, pending = in_flight.pop(index)
            if pending is not None:
                mean = pending.wait().split([part.numel() for part in parts])
                for part, averaged in zip(parts, mean, strict=True):
                    part.copy_(averaged.view(part.shape))
            if (ahead := index + PREFETCH + 1) < len(blocks):
                in_flight[ahead] = self._start(ahead, order)

    def _start(self, index: int, order: int) -> tuple[list[torch.Tensor], PendingCollective | None]:
        """Return a block's moments and their mean on its way; None for a block without any, on all replicas."""
        parts = self.replica.moments(index, order)
        if not parts:
            return parts, None
        message = torch.cat([part.reshape(-1) for part in parts]).div_(self.replica_comms.size)
        return parts, self.replica_comms.all_reduce(message, f"averaging moments of {self.replica.blocks[index].name}")
