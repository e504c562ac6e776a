"""What every schedule does with one block: send this replica's part, receive the mean, take the outer step."""

from __future__ import annotations

import torch

from llmtrain.parallel.comms import Comms, Pending, RoundedReduction
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.wire import Wire
from llmtrain.sync.anchors import Anchors, flatten, unflatten_into
from llmtrain.sync.outer import Outer
from llmtrain.sync.report import SyncReport
from llmtrain.sync.round import Round

PREFETCH = 2
"""Reductions under way beyond the one being finished when blocks synchronise one after another."""


class Reduction:
    """A block's mean on its way; `wait` may be called more than once."""

    def __init__(self, pending: Pending, error: torch.Tensor | None = None):
        """`error`: where this block's rounding errors are collected, if they are."""
        self._pending, self._error = pending, error

    def proceed(self) -> None:
        """Start its second exchange, if the wire has one; all replicas at the same moment."""
        self._pending.proceed()

    def wait(self) -> torch.Tensor:
        """The mean. What rounding left out of this replica's message is kept for the next one."""
        mean = self._pending.wait()
        if self._error is not None and isinstance(self._pending, RoundedReduction):
            # A broken replica's NaN is in this mean; it must not come back with the next one.
            self._error += self._pending.lost().nan_to_num_(0.0, 0.0, 0.0)
            self._error = None
        return mean


class Synchroniser:
    """The parts of a synchronisation, block by block. Without `anchors` the parameters themselves are averaged, which
    needs no extra memory. With `feedback`, rounding errors of the wire are carried over."""

    def __init__(
        self,
        engine: Engine,
        replica: Comms,
        shard: Comms,
        outer: Outer,
        anchors: Anchors | None,
        wire: Wire | None,
        feedback: bool,
    ):
        self.engine, self.replica, self.shard = engine, replica, shard
        self.outer, self.anchors, self.wire, self.feedback = outer, anchors, wire, feedback
        self.errors: list[torch.Tensor] = []
        """By block: what this rank's rounding has left out so far; empty without feedback."""
        self.report = SyncReport()

    @property
    def blocks(self) -> range:
        """Indices of all blocks, in forward order."""
        return range(len(self.engine.blocks))

    def begin(self) -> None:
        """Replicas are equal and local steps begin: take the anchor, if there is one to take."""
        if self.anchors is not None and not self.anchors.taken:
            self.anchors.take()
        if self.feedback and not self.errors:
            self.errors = [torch.zeros_like(flatten(block)) for block in self.engine.blocks]

    def wait_for_device(self) -> None:
        """Until a GPU has done what it was given: before the host takes a time that is to be the GPU's too."""
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()

    def message(self, index: int) -> torch.Tensor:
        """What this replica has to say of a block: its pseudo-gradient, or its parameters where no anchor is kept."""
        parameters = flatten(self.engine.blocks[index])
        return parameters if self.anchors is None else self.anchors.load_anchor(index) - parameters

    def send(self, index: int, weight: float | None = None) -> Reduction:
        """Start the weighted sum (default: the mean) over the replicas of their messages on a block."""
        weight = 1 / self.replica.size if weight is None else weight
        message = self.message(index)
        # A replica that does not count sends zeros, not 0 x its pseudo-gradient: that may hold NaN.
        message = message.zero_() if weight == 0 else message.mul_(weight)
        if self.errors and weight > 0:
            message += self.errors[index]
            self.errors[index].zero_()
        pending = self.replica.all_reduce(message, f"synchronising {self.engine.blocks[index].name}", self.wire)
        return Reduction(pending, self.errors[index] if self.errors else None)

    def arrived(self, index: int, mean: torch.Tensor) -> Reduction:
        """A reduction that is complete already: one taken from a checkpoint."""
        device = self.engine.blocks[index].shards[0].device
        return Reduction(Pending(self.replica, "", None, mean.to(device)))

    def step(self, index: int, mean: torch.Tensor, since: Round) -> torch.Tensor:
        """The block's next anchor, from the mean pseudo-gradient over the local steps `since`."""
        anchor, momentum = self.anchors.load(index)
        self.outer.step(anchor, mean, momentum, since)
        self.anchors.store(index, anchor, momentum)
        return anchor

    def install(self, index: int, parameters: torch.Tensor, mix: float = 0.0) -> None:
        """The block's parameters become `mix` x their own + (1 - mix) x the given ones."""
        block = self.engine.blocks[index]
        if mix:
            parameters = torch.lerp(parameters, flatten(block), mix)
        unflatten_into(parameters, block)
        self.engine.publish(block)

    def return_to_anchor(self) -> None:
        """The parameters become those of the last synchronisation. Needs anchors."""
        for index in self.anchors.visit(self.blocks):
            self.install(index, self.anchors.load_anchor(index))

    def together(self, since: Round) -> None:
        """Synchronise all blocks now, each replica counting alike; after it all replicas are equal. Needs anchors."""
        under_way = [self.send(index) for index in self.blocks[: PREFETCH + 1]]
        for index in self.anchors.visit(self.blocks, momentum=True):
            mean = under_way[index].wait()
            if index + 1 < len(under_way):
                under_way[index + 1].proceed()
            if len(under_way) < len(self.blocks):
                under_way.append(self.send(len(under_way)))
            self.install(index, self.step(index, mean, since))
            under_way[index] = None  # frees the message
