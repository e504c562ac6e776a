"""Messages in flight: pseudo-gradients of some blocks, taken after one step, whose mean is applied after a later step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from llmtrain.parallel.collectives import PendingCollective
from llmtrain.sync.anchors import BlockTensors
from llmtrain.sync.block_sync import BlockSync, PendingReduction, squared_norm
from llmtrain.sync.local_steps import LocalSteps
from llmtrain.sync.weighing import Weighing


class Message:
    """Pseudo-gradients of some blocks, sent when they are taken, and their plain mean over the replicas.

    The schedule calls `take` or `load`, then `advance` after every step, then `apply`. Every call may start or wait
    for collectives, so all ranks must make the same calls in the same order.
    """

    SENT_AFTER = 0
    """Steps between `take` and sending."""

    def __init__(self, block_sync: BlockSync, blocks: Sequence[int], local_steps: LocalSteps):
        self.block_sync, self.blocks = block_sync, blocks
        self.local_steps = local_steps
        """Local steps that led to the pseudo-gradients."""
        self.restarted_blocks: frozenset[int] = frozenset()
        """Blocks from which this replica was excluded. It sets them to the next anchor without mixing in its own parameters."""
        self.target_norms: Mapping[int, float] = {}
        """Norms to which the reduction rescales or clips the means, by block. The means of other blocks are used as they arrive."""
        self._pending: dict[int, PendingReduction] = {}

    def take(self) -> None:
        """Compute the present pseudo-gradients and start their reductions."""
        for index in self.block_sync.anchors.iter_prefetched(self.blocks):
            self._pending[index] = self.block_sync.start_reduce(index)

    def advance(self, age: int, due: int) -> None:
        """Carry out the work that is due at the end of a step, `age` steps after `take`. The message is applied `due` steps after
        `take`. If the format has two phases, the second one starts halfway between sending and applying."""
        halfway = (self.SENT_AFTER + due) // 2
        if age == halfway and age > self.SENT_AFTER:
            self._start_second_phase()

    def send(self) -> None:
        """Start the reductions unless they have been started. In this class, `take` has started them."""

    def complete(self) -> None:
        """Wait until the means have arrived and the rounding errors of this message are known."""
        self._start_second_phase()
        for index in sorted(self._pending):
            self._pending[index].wait()

    def apply(self, alpha: float = 0.0, gap: float = 1.0) -> None:
        """Wait for the means, take the outer step with the means divided by `gap`, and set the parameters to alpha x this
        replica's parameters + (1 - alpha) x the next anchor. Set blocks without a mean to the anchor."""
        block_sync, squares = self.block_sync, []
        self.complete()
        for index in block_sync.anchors.iter_prefetched(self.blocks, with_state=True):
            if index not in self._pending:
                block_sync.write_parameters(index, block_sync.anchors.load_anchor(index))
                continue
            mean = self._pending.pop(index).wait()
            squares.append(squared_norm(mean))
            own = 0.0 if index in self.restarted_blocks else alpha
            block_sync.outer_step(index, mean, self.local_steps, self._factor(index, mean, squares[-1], gap), own)
        block_sync.stats.mean_squared = torch.stack(squares).sum() if squares else 0.0
        self._record_weights()

    def wait(self) -> None:
        """Wait for the collectives that have been started, without changing anything."""
        self.means()

    def means(self) -> dict[int, torch.Tensor]:
        """Wait for the means and return them by block; empty until the message is sent."""
        return {index: self._pending[index].wait() for index in sorted(self._pending)}

    def unsent(self) -> dict[int, torch.Tensor]:
        """Return this replica's pseudo-gradients by block; empty once they are sent."""
        return {}

    def load(
        self,
        means: BlockTensors,
        unsent: BlockTensors,
        restarted_blocks: Sequence[int] = (),
        target_norms: Mapping[int, float] | None = None,
    ) -> None:
        """Restore the message from the `means()`, `unsent()`, `restarted_blocks` and `target_norms` in a checkpoint."""
        self.restarted_blocks, self.target_norms = frozenset(restarted_blocks), target_norms or {}
        for index in self.blocks:
            if means[index] is not None:
                self._pending[index] = self.block_sync.completed_reduction(index, means[index])

    def _start_second_phase(self) -> None:
        for index in sorted(self._pending):
            self._pending[index].start_second_phase()

    def _factor(self, index: int, mean: torch.Tensor, squared: torch.Tensor, gap: float) -> torch.Tensor | float | None:
        """Return the factor by which a block's mean is multiplied; None for 1. `squared` is the squared norm of this rank's
        part of the mean. A collective of the shard group for a block with a target norm."""
        return None if gap == 1.0 else 1 / gap

    def _record_weights(self) -> None:
        self.block_sync.stats.weights_max = 1 / self.block_sync.replica_comms.size


class WeightedMessage(Message):
    """Message with a weighted mean, whose weights follow from all replicas' norms, tokens or steps.

    `take` keeps the pseudo-gradients and starts the weighing. One step later, every replica reads the weights from the weighing
    and sends. A replica that is excluded from a block sends zeros, and continues from the anchor alone when the mean is applied,
    because its own parameters may be NaN. A block from which all replicas are excluded is not sent.
    """

    SENT_AFTER = 1

    def __init__(self, block_sync: BlockSync, blocks: Sequence[int], local_steps: LocalSteps, weighing: Weighing):
        super().__init__(block_sync, blocks, local_steps)
        self.weighing = weighing
        self._unsent: dict[int, torch.Tensor] = {}
        self._gathering: PendingCollective | None = None

    def take(self) -> None:
        """Keep the present pseudo-gradients and start the weighing."""
        visited = self.block_sync.anchors.iter_prefetched(self.blocks)
        self._unsent = {index: self.block_sync.payload(index) for index in visited}
        self._start_weighing()

    def advance(self, age: int, due: int) -> None:
        """Send one step after `take`; otherwise do what every message does at the end of a step."""
        if age == self.SENT_AFTER:
            self.send()
        super().advance(age, due)

    def send(self) -> None:
        """Wait for the weighing, compute the weights, and start the reductions. Do nothing if they have been started."""
        if self._gathering is None:
            return
        agreed = self.weighing.agree(self.blocks, self._gathering)
        self._gathering, self.local_steps, self.restarted_blocks = None, agreed.local_steps, agreed.excluded
        self.target_norms = agreed.target_norms
        for index in self.blocks:
            payload = self._unsent.pop(index)
            if index not in agreed.rolled_back:
                self._pending[index] = self.block_sync.start_reduce(index, agreed.weights[index], payload)

    def complete(self) -> None:
        """Send the message if it is not sent, and wait until the means have arrived."""
        self.send()
        super().complete()

    def wait(self) -> None:
        super().wait()
        if self._gathering is not None:
            self._gathering.wait()

    def unsent(self) -> dict[int, torch.Tensor]:
        return self._unsent

    def load(
        self,
        means: BlockTensors,
        unsent: BlockTensors,
        restarted_blocks: Sequence[int] = (),
        target_norms: Mapping[int, float] | None = None,
    ) -> None:
        super().load(means, unsent, restarted_blocks, target_norms)
        for index in self.blocks:
            if unsent[index] is not None:
                device = self.block_sync.replica.blocks[index].shards[0].device
                self._unsent[index] = unsent[index].to(device, copy=True)  # sending overwrites it
        if self._unsent:
            self._start_weighing()

    def _start_weighing(self) -> None:
        measured = self._unsent.items() if self.weighing.uses_norms else ()
        squares = [self.block_sync.squared_norm(index, payload) for index, payload in measured]
        self._gathering = self.weighing.start(self.local_steps, squares)

    def _factor(self, index: int, mean: torch.Tensor, squared: torch.Tensor, gap: float) -> torch.Tensor | float | None:
        if index not in self.target_norms:
            return super()._factor(index, mean, squared, gap)
        return (self.weighing.factor(squared, self.target_norms[index]) / gap).to(mean.dtype)

    def _record_weights(self) -> None:
        """Do nothing, because the weighing has recorded the weights."""
