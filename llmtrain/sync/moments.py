"""Averages of the inner optimizer's moments over the replicas, at the end of every Nth round (DES-LOC, arXiv 2505.22549)."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from llmtrain.config import MomentsSection
from llmtrain.errors import RecipeError
from llmtrain.parallel.collectives import PendingCollective, results_in_order
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.engine import Replica
from llmtrain.parallel.optimizers import MOMENTS
from llmtrain.sync.sync_stats import SyncStats


class MomentAverages:
    """Averages of first and second moments, block by block, in the moments' own dtype. Training waits for them."""

    def __init__(
        self, section: MomentsSection, replica: Replica, replica_comms: Comms, shard_comms: Comms, stats: SyncStats
    ):
        self.section, self.replica, self.stats = section, replica, stats
        self.replica_comms, self.shard_comms = replica_comms, shard_comms
        self._rounds = 0

    def end_round(self) -> None:
        """Count a round and average the moments that are due. A collective of all ranks."""
        self._rounds += 1
        if self.replica_comms.size == 1:
            return
        # Second moments first, because `_install` clears first moments whose second moment is 0, and averaged second moments
        # rarely are.
        orders = ((2, self.section.second), (1, self.section.first))
        if due := [order for order, every in orders if every is not None and self._rounds % every == 0]:
            self._check()
        for order in due:
            with self.stats.time_exposed():
                self._average(order)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rounds so far."""
        return {"rounds": self._rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rounds = state["rounds"]

    def _check(self) -> None:
        """Raise RecipeError, on every rank, unless all replicas have the moments that are averaged, and have them for the same
        parameters. torch creates a parameter's moments with its first gradient. A collective of all ranks."""
        blocks, device = self.replica.blocks, self.replica_comms.device
        # Size of each parameter's moment on this rank, by order and block; 0 for a parameter without one.
        sizes = [
            [
                [0 if m is None else m.numel() for m in self.replica.moments(index, order)]
                for index in range(len(blocks))
            ]
            for order in (1, 2)
        ]
        values = [[zlib.crc32(repr(block).encode()) if any(block) else 0 for block in of_order] for of_order in sizes]
        of_all = self.replica_comms.all_gather(torch.tensor(values, device=device), "comparing the replicas' moments")
        found = torch.stack(((of_all != 0).any(0), (of_all != of_all[0]).any(0))).long().to(self.shard_comms.device)
        exist, differ = self.shard_comms.all_gather(found, "comparing the shards' moments").any(0).tolist()
        for order, every in enumerate((self.section.first, self.section.second)):
            name = ("first", "second")[order]
            if every is not None and not any(exist[order]):
                raise RecipeError(
                    f"sync.moments.{name} averages {name} moments, but the optimizer has none ({', '.join(MOMENTS[order + 1])}); use "
                    "another one, or null"
                )
            if every is not None and any(differ[order]):
                raise RecipeError(
                    f"replicas have {name} moments of different parameters of {blocks[differ[order].index(True)].name}; give every "
                    "parameter a gradient on all replicas, or set sync.moments to null"
                )

    def _average(self, order: int) -> None:
        blocks = ((index, self._start(index, order)) for index in range(len(self.replica.blocks)))
        for index, mean in results_in_order((index, pending) for index, pending in blocks if pending is not None):
            self._install(index, order, mean)

    def _start(self, index: int, order: int) -> PendingCollective | None:
        """Start averaging a block's moments. Return None for a block without moments. Such a block has no moments on any replica."""
        parts = [moment.reshape(-1) for moment in self.replica.moments(index, order) if moment is not None]
        if not parts:
            return None
        message = torch.cat(parts).div_(self.replica_comms.size)
        return self.replica_comms.start_all_reduce(message, f"averaging moments of {self.replica.blocks[index].name}")

    def _install(self, index: int, order: int, mean: torch.Tensor) -> None:
        moments = self.replica.moments(index, order)
        parts = iter(mean.split([moment.numel() for moment in moments if moment is not None]))
        for moment, second in zip(moments, self.replica.moments(index, 2), strict=True):
            if moment is None:
                continue
            moment.copy_(next(parts).view(moment.shape))
            if order == 1 and second is not None:
                # A second moment of 0 means that this value has had no gradient yet, such as the embedding of a token that has not
                # occurred. AdamW would divide the averaged first moment by epsilon alone.
                moment.masked_fill_(second == 0, 0.0)
