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
        if self.replica_comms.size == 1:
            return
        if self._rounds == 1:
            self._check()
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

    def _check(self) -> None:
        """Raise RecipeError, on every rank, unless all replicas have moments to average, and of the same tensors: torch creates
        them with the first gradient. A collective of the replica group."""
        blocks = range(len(self.replica.blocks))
        for order, every in ((1, self.section.first), (2, self.section.second)):
            moments = [self.replica.moments(index, order) for index in blocks]
            values = torch.tensor([sum(m.numel() for m in of_block if m is not None) for of_block in moments])
            of_all = self.replica_comms.all_gather(
                values.to(self.replica_comms.device), "comparing the replicas' moments"
            )
            name = ("first", "second")[order - 1]
            if every is not None and not of_all.any():
                raise RecipeError(
                    f"sync.moments.{name} averages {name} moments, but the optimizer has none ({', '.join(MOMENTS[order])}); use "
                    "another one, or null"
                )
            if (differ := (of_all != of_all[0]).any(0).nonzero().flatten().tolist()) and every is not None:
                raise RecipeError(
                    f"replicas have {name} moments of different parameters of {self.replica.blocks[differ[0]].name}; give every parameter "
                    "a gradient on all replicas, or set sync.moments to null"
                )

    def _average(self, order: int) -> None:
        blocks = range(len(self.replica.blocks))
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
