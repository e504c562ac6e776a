"""One synchronisation of all blocks, in the pieces that schedules put in order: open, block by block, close."""

from __future__ import annotations

import time

import torch

from llmtrain.parallel.comms import Comms, Pending
from llmtrain.parallel.engine import Engine
from llmtrain.sync.anchors import Anchors, flatten, unflatten_into
from llmtrain.sync.outer import Outer
from llmtrain.sync.penalty import Penalty, Verdict
from llmtrain.sync.report import SyncReport


class Synchroniser:
    """Brings the replicas together: reduces each block's pseudo-gradient and applies the outer step.

    Without `anchors` the parameters themselves are averaged, which needs no extra memory. A round is `open`, then
    `synchronise(0..L-1)` in order, then `close`; while block i is finished, the reductions of the next `prefetch`
    blocks are under way.
    """

    def __init__(
        self,
        engine: Engine,
        replica: Comms,
        shard: Comms,
        outer: Outer,
        anchors: Anchors | None,
        penalty: Penalty | None,
        prefetch: int,
    ):
        assert anchors is not None or penalty is None, "a penalty is on pseudo-gradients, which need an anchor"
        self.engine, self.replica, self.shard = engine, replica, shard
        self.outer, self.anchors, self.penalty, self.prefetch = outer, anchors, penalty, prefetch
        self.report = SyncReport()
        self._verdict: Verdict | None = None
        self._pending: dict[int, Pending] = {}
        self._spread: torch.Tensor | float = 0.0
        self._mean: torch.Tensor | float = 0.0
        self._opened_at = self._closed_at = time.monotonic()

    def open(self) -> None:
        """Meet the other replicas; with a penalty, agree from everybody's norms on who counts in which block."""
        self._opened_at = time.monotonic()
        busy = torch.tensor([self._opened_at - self._closed_at], dtype=torch.float64)
        row = torch.cat([busy, self._norms()]) if self.penalty is not None else busy
        gathered = self.replica.all_gather(row.to(self.replica.device), "meeting for a synchronisation").cpu()
        self.report.wait_seconds += time.monotonic() - self._opened_at
        self.report.slowest_replica = int(gathered[:, 0].argmax())
        if self.penalty is not None:
            self._verdict = self.penalty.judge(gathered[:, 1:])
            self.report.anomalies += int(self._verdict.anomalous.sum())
            self.report.rollbacks += int(self._verdict.anomalous.all(0).sum())
        self.report.weights_max = float(self._verdict.weights.max()) if self._verdict else 1 / self.replica.size
        self._spread = self._mean = 0.0

    def synchronise(self, index: int) -> None:
        """Finish block `index`: after it, its parameters are the next anchor on every replica."""
        for ahead in range(index, min(index + self.prefetch + 1, len(self.engine.blocks))):
            if ahead not in self._pending and not self._rolls_back(ahead):
                self._pending[ahead] = self._start(ahead)
        block = self.engine.blocks[index]
        anchor, momentum = self.anchors.load(index) if self.anchors is not None else (None, None)
        if self._rolls_back(index):
            unflatten_into(anchor, block)
        elif anchor is None:
            mean = self._pending.pop(index).wait()
            self._spread = self._spread + (flatten(block) - mean).square().sum()
            unflatten_into(mean, block)
        else:
            mean = self._pending.pop(index).wait()
            if self._weight(index) > 0:
                self._spread = self._spread + (anchor - flatten(block) - mean).square().sum()
            squared = mean.square().sum()
            self._mean = self._mean + squared
            if self.penalty is not None and self.penalty.section.clip is not None:
                mean *= self.penalty.clip_factor(self.shard.all_reduce(squared, "norm of a pseudo-gradient").wait())
            self.outer.step(anchor, mean, momentum)
            self.anchors.store(index, anchor, momentum)
            unflatten_into(anchor, block)
        self.engine.publish(block)

    def close(self) -> None:
        """All blocks are done: count the round."""
        self._closed_at = time.monotonic()
        self.report.count += 1
        self.report.seconds += self._closed_at - self._opened_at
        self.report.mean_squared, self.report.spread_squared = float(self._mean), float(self._spread)

    def _message(self, index: int) -> torch.Tensor:
        """What this replica has to say of a block: its pseudo-gradient, or its parameters where no anchor is kept."""
        parameters = flatten(self.engine.blocks[index])
        return parameters if self.anchors is None else self.anchors.load_anchor(index) - parameters

    def _weight(self, index: int) -> float:
        """How much this replica counts in the block's mean."""
        return (
            1 / self.replica.size if self._verdict is None else float(self._verdict.weights[self.replica.rank, index])
        )

    def _start(self, index: int) -> Pending:
        message, weight = self._message(index), self._weight(index)
        # An anomalous replica sends zeros, not 0 x its pseudo-gradient: that may hold NaN.
        message = message.zero_() if weight == 0 else message.mul_(weight)
        return self.replica.all_reduce(message, f"synchronising {self.engine.blocks[index].name}")

    def _norms(self) -> torch.Tensor:
        """This replica's pseudo-gradient norm of every block, over all its shards: [blocks], float64, one collective."""
        squares = [self._message(i).double().square().sum() for i in range(len(self.engine.blocks))]
        return self.shard.all_reduce(torch.stack(squares), "norms of pseudo-gradients").wait().sqrt().cpu()

    def _rolls_back(self, index: int) -> bool:
        return self._verdict is not None and bool(self._verdict.anomalous[:, index].all())
