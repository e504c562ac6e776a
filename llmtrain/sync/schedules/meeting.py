"""Blocking and layer-wise: replicas meet at a round's end, then synchronise block by block."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from llmtrain.sync.alike import alike
from llmtrain.sync.penalty import Penalty, Verdict
from llmtrain.sync.round import Round, mean_round
from llmtrain.sync.schedules.schedule import ByBlock, Schedule
from llmtrain.sync.synchroniser import Reduction, Synchroniser


class Meeting(Schedule):
    """A due synchronisation is *armed*. With `in_forward` the next training forward carries it out as it reaches each
    block (EDiT), otherwise it happens at once. While block i is finished, the reductions of the next `prefetch` blocks are
    under way."""

    def __init__(self, synchroniser: Synchroniser, penalty: Penalty | None, in_forward: bool, prefetch: int):
        super().__init__(synchroniser)
        assert synchroniser.anchors is not None or penalty is None, "a penalty is on pseudo-gradients: needs an anchor"
        self.penalty, self.in_forward, self.prefetch = penalty, in_forward, prefetch
        self._round = Round()
        self._agreed_round = Round()  # the round as all replicas see it, once they have met
        self._next_block: int | None = None  # of the armed synchronisation
        self._verdict: Verdict | None = None
        self._under_way: dict[int, Reduction] = {}
        self._spread: torch.Tensor | float = 0.0
        self._mean: torch.Tensor | float = 0.0
        self._opened_at = self._closed_at = time.monotonic()

    def end_step(self, step: int, lr: float, ends_round: bool) -> None:
        self._round = self._round.then(lr)
        if ends_round:
            self._next_block = 0
            if not self.in_forward:
                self.settle()

    def before_block(self, index: int) -> None:
        if self._next_block is None:
            return
        assert index == self._next_block, f"block {index} was reached before block {self._next_block}"
        if index == 0:
            self.synchroniser.wait_for_device()  # local steps are no part of it; it would be waited for in `_open`
        with self.synchroniser.report.exposed():
            if index == 0:
                self._open()
            self._bring(index)
            self._synchronise(index)
            self._release(index)
            self._next_block = index + 1
            if self._next_block == len(self.synchroniser.blocks):
                self._close()

    def settle(self) -> None:
        if self._next_block is not None:
            for index in self.synchroniser.blocks:
                self.before_block(index)

    def finish(self) -> None:
        if self._round.steps > 0:
            self._next_block = 0
        self.settle()

    @property
    def is_synchronised(self) -> bool:
        return self._round.steps == 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "round": self._round.state(),
            "armed": self._next_block is not None,
            "penalty": self.penalty.state_dict() if self.penalty else None,
        }

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, ByBlock]) -> None:
        self._round = Round(**state["round"])
        self._next_block = 0 if state["armed"] else None
        if self.penalty is not None:
            self.penalty.load_state_dict(state["penalty"])

    def reshaped(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Rounds of seconds leave each replica with a round of its own: the others' mean, as in a synchronisation."""
        statistics = alike([state["penalty"] for state in states])
        return {
            "round": mean_round([Round(**state["round"]) for state in states]).state(),
            "armed": alike([state["armed"] for state in states]),
            "penalty": self.penalty.reshaped(statistics) if self.penalty is not None else None,
        }

    def _open(self) -> None:
        """Meet the other replicas; with a penalty, agree from everybody's norms on who counts in which block."""
        replica, report = self.synchroniser.replica, self.synchroniser.report
        self._opened_at = time.monotonic()
        done = self._round
        row = torch.tensor(
            [self._opened_at - self._closed_at, done.steps, done.last_lr, done.lr_sum], dtype=torch.float64
        )
        if self.penalty is not None:
            row = torch.cat([row, self._norms()])
        with report.waiting():
            gathered = replica.all_gather(row.to(replica.device), "meeting for a synchronisation").cpu()
        report.slowest_replica = int(gathered[:, 0].argmax())
        self._agreed_round = Round(*gathered[:, 1:4].mean(0).tolist())
        if self.penalty is not None:
            self._verdict = self.penalty.judge(gathered[:, 4:], gathered[:, 1])
            report.anomalies += int(self._verdict.anomalous.sum())
            report.rollbacks += int(self._verdict.anomalous.all(0).sum())
        report.weights_max = float(self._verdict.weights.max()) if self._verdict else 1 / replica.size
        self._spread = self._mean = 0.0

    def _synchronise(self, index: int) -> None:
        """Finish block `index`: after it, its parameters are the next anchor on every replica."""
        synchroniser = self.synchroniser
        for ahead in synchroniser.blocks[index : index + self.prefetch + 1]:
            if ahead not in self._under_way and not self._rolls_back(ahead):
                self._under_way[ahead] = synchroniser.send(ahead, self._weight(ahead))
        if self._rolls_back(index):
            synchroniser.install(index, synchroniser.anchors.load_anchor(index))
            return
        mean = self._under_way.pop(index).wait()
        if index + 1 in self._under_way:
            self._under_way[index + 1].proceed()
        if self._weight(index) > 0:
            self._spread = self._spread + (synchroniser.message(index) - mean).square().sum()
        if synchroniser.anchors is None:
            synchroniser.install(index, mean)
            return
        squared = torch.linalg.vector_norm(mean, dtype=torch.float64).square()
        self._mean = self._mean + squared
        if self.penalty is not None and self.penalty.section.clip is not None:
            whole = synchroniser.shard.all_reduce(squared, "norm of a pseudo-gradient").wait()
            # All replicas must find the same factor, and other GPUs sum in another order: in fp64, rounded at the end.
            mean *= self.penalty.clip_factor(whole).to(mean.dtype)
        synchroniser.install(index, synchroniser.step(index, mean, self._agreed_round))

    def _bring(self, index: int) -> None:
        """Offloaded anchors are announced a block before they are sent, momentum a block before it is used."""
        anchors = self.synchroniser.anchors
        if anchors is not None:
            for near in self.synchroniser.blocks[index : index + self.prefetch + 2]:
                anchors.bring(near, momentum=near <= index + 1)

    def _release(self, index: int) -> None:
        if self.synchroniser.anchors is not None:
            self.synchroniser.anchors.release(index)

    def _close(self) -> None:
        """All blocks are done: count the round."""
        if not self.in_forward:
            self.synchroniser.wait_for_device()  # training stands still until then
        self._closed_at = time.monotonic()
        report = self.synchroniser.report
        report.count += 1
        report.seconds += self._closed_at - self._opened_at
        report.mean_squared, report.spread_squared = self._mean, self._spread
        self._next_block, self._round = None, Round()

    def _weight(self, index: int) -> float:
        """How much this replica counts in the block's mean."""
        replica = self.synchroniser.replica
        return 1 / replica.size if self._verdict is None else float(self._verdict.weights[replica.rank, index])

    def _norms(self) -> torch.Tensor:
        """This replica's pseudo-gradient norm of every block, over all its shards: [blocks], float64, one collective."""
        visited = self.synchroniser.anchors.visit(self.synchroniser.blocks)
        squares = [self.synchroniser.message(index).double().square().sum() for index in visited]
        return self.synchroniser.shard.all_reduce(torch.stack(squares), "norms of pseudo-gradients").wait().sqrt().cpu()

    def _rolls_back(self, index: int) -> bool:
        return self._verdict is not None and bool(self._verdict.anomalous[:, index].all())
