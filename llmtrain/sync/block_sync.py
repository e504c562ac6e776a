"""Operations on one block, shared by all schedules: send the payload, receive the mean, take the outer step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from llmtrain.parallel.collectives import PendingCollective, results_in_order
from llmtrain.parallel.comms import AnyFormat, Comms
from llmtrain.parallel.engine import Replica
from llmtrain.pieces import exact_norms
from llmtrain.sync.anchors import Anchors, flat_view, flatten, parameter_parts, parts_of, unflatten_into
from llmtrain.sync.local_steps import LocalSteps
from llmtrain.sync.outer import Outer
from llmtrain.sync.sync_stats import SyncStats

COMPARING = "comparing the first anchors"
FIRST_ANCHORS_DIFFER = (
    "replicas had different parameters after the synchronous steps, so all of them continue with the parameters of replica 0; "
    "different kinds of devices round differently, especially with optim.kind=muon"
)


class PendingReduction:
    """A block's reduction in flight. `wait` may be called more than once."""

    def __init__(self, pending: PendingCollective, error: torch.Tensor | None = None):
        """Wrap `pending`. `error`, if given, is the block's error-feedback buffer, to which `wait` adds this message's rounding
        error."""
        self._pending, self._error = pending, error

    def start_second_phase(self) -> None:
        """Start the second phase, if the format has two. All replicas must call this between the same two collectives."""
        self._pending.start_second_phase()

    def wait(self) -> torch.Tensor:
        """Wait for the mean and return it. With error feedback, store the rounding error of this rank's message, to be added to its
        next message."""
        mean = self._pending.wait()
        if self._error is not None and (lost := self._pending.quantization_error()) is not None:
            # A broken replica's NaN spoils this mean anyway, but must not enter the next message.
            self._error += lost.nan_to_num_(0.0, 0.0, 0.0)
            self._error = None
        return mean


class BlockSquares:
    """Squared norms of this rank's part of one block, float64 scalars. An outer step computes them part by part, while the
    operands are in the processor's cache."""

    def __init__(self) -> None:
        self._distances: list[torch.Tensor] = []
        self._means: list[torch.Tensor] = []

    def add(self, pseudo_gradient: torch.Tensor, mean: torch.Tensor) -> None:
        """Add one part of the block to the norms. `pseudo_gradient` is overwritten."""
        self._distances.append(_square(pseudo_gradient.sub_(mean)))
        self._means.append(_square(mean))

    @property
    def distance(self) -> torch.Tensor:
        """Squared distance of the pseudo-gradient from the mean."""
        return _sum(self._distances)

    @property
    def mean(self) -> torch.Tensor:
        """Squared norm of the mean before clipping."""
        return _sum(self._means)


class BlockSync:
    """Operations on one block, from which every schedule composes its synchronization.

    Without `anchors`, the parameters themselves are averaged, which needs no extra memory. `feedback_decay`, if not None,
    turns on error feedback: the next message includes this one's rounding errors, times the decay.
    """

    def __init__(
        self,
        replica: Replica,
        replica_comms: Comms,
        shard_comms: Comms,
        outer: Outer,
        anchors: Anchors | None,
        wire: AnyFormat | None,
        feedback_decay: float | None,
    ):
        self.replica, self.replica_comms, self.shard_comms = replica, replica_comms, shard_comms
        self.outer, self.anchors, self.wire, self.feedback_decay = outer, anchors, wire, feedback_decay
        self.rounding_errors: list[torch.Tensor] = []
        """Rounding errors to add to this rank's next message, by block. Empty without error feedback."""
        self.rounds_done = 0
        """Completed rounds. The outer learning rate and momentum of the next round depend on it."""
        self.stats = SyncStats(replica_comms.training_device)
        self.warnings: list[str] = []
        """One-line warnings that have not been shown yet; the same on all ranks."""

    @property
    def blocks(self) -> range:
        """Indices of all blocks, in forward order."""
        return range(len(self.replica.blocks))

    def complete_round(self) -> None:
        """Count a round. Schedules call this when the last block or fragment of the round is synchronized."""
        self.rounds_done += 1
        self.stats.count = self.rounds_done

    def ensure_anchor(self) -> None:
        """Take the first anchor and allocate the error-feedback buffers, if the method keeps them and they do not exist yet.
        If replicas differ, let all continue with the parameters of replica 0. The first call is a collective of all ranks."""
        if self.anchors is not None and not self.anchors.is_set:
            self.anchors.snapshot()
            if self._anchors_differ():
                self._copy_first_replica()
                self.anchors.snapshot()
                self.warnings.append(FIRST_ANCHORS_DIFFER)
        if self.feedback_decay is not None and not self.rounding_errors:
            self.rounding_errors = [torch.zeros_like(flat_view(block)) for block in self.replica.blocks]

    def _anchors_differ(self) -> bool:
        """Return, on all ranks alike, whether the anchors of any two replicas differ."""
        if self.replica_comms.size == 1:
            return False
        replicas, shards = self.replica_comms.with_own_traffic(), self.shard_comms.with_own_traffic()
        sums = replicas.all_gather(self.anchors.fingerprint().to(replicas.device), COMPARING)
        differ = (sums != sums[0]).any().long()
        return bool(shards.all_gather(differ.to(shards.device), COMPARING).any())

    def _copy_first_replica(self) -> None:
        """Give all replicas the parameters of the first one."""
        for index, block in enumerate(self.replica.blocks):
            flat = flatten(block)
            if self.replica_comms.rank > 0:
                flat.zero_()
            self.write_parameters(index, self.replica_comms.all_reduce(flat, "copying the first replica"))

    def wait_for_device(self) -> None:
        """Wait for the work on the replica's current CUDA stream, so that a host clock that is read afterwards includes it. Do
        nothing for a single replica, whose times are not compared with others."""
        device = self.replica_comms.training_device
        if device.type == "cuda" and self.replica_comms.size > 1:
            torch.cuda.current_stream(device).synchronize()

    def payload(self, index: int, weight: float = 1.0) -> torch.Tensor:
        """Return what this replica sends for a block, as a new flat tensor: `weight` times its pseudo-gradient, or times its
        parameters if no anchor is kept."""
        block = self.replica.blocks[index]
        if self.anchors is None:
            return flatten(block).mul_(weight)
        anchor = self.anchors.load_anchor(index)
        message = torch.empty_like(anchor)
        for parameters, anchor_part, message_part in parts_of(parameter_parts(block), anchor, message):
            torch.sub(anchor_part, parameters, out=message_part).mul_(weight)
        return message

    def squared_norm(self, index: int, payload: torch.Tensor | None = None) -> torch.Tensor:
        """Return the squared norm of this rank's part of a block's pseudo-gradient, a float64 scalar. The pseudo-gradient is
        `payload`, if given, and otherwise computed from the present parameters. Requires anchors."""
        # Sum shard by shard. torch's engines have the same shards, but not the same flat tensors, and another order of summation
        # would change the replicas' weights, which follow from these norms.
        shards = self.replica.blocks[index].shards
        if payload is not None:
            return _sum(_square(part) for _, part in parts_of(shards, payload))
        return _sum(
            _square(anchor_part - own) for own, anchor_part in parts_of(shards, self.anchors.load_anchor(index))
        )

    def squared_spread(self, index: int, mean: torch.Tensor) -> torch.Tensor:
        """Return the squared distance of this rank's part of a block from the replicas' mean, a float64 scalar. For methods
        without anchors; methods with anchors measure it in `outer_step`."""
        parts = parts_of(parameter_parts(self.replica.blocks[index]), mean)
        return _sum(_square(parameters - mean_part) for parameters, mean_part in parts)

    def start_reduce(
        self, index: int, weight: float | None = None, payload: torch.Tensor | None = None
    ) -> PendingReduction:
        """Start the weighted sum of the replicas' payloads for a block, by default their mean. `weight` is this replica's weight.
        `payload`, if given, is an earlier payload that is sent instead of the present one, and overwritten."""
        weight = 1 / self.replica_comms.size if weight is None else weight
        message = self.payload(index, weight) if payload is None else payload.mul_(weight)
        # A replica of weight 0 sends zeros. 0 x its pseudo-gradient would not do, because it may contain NaN.
        if weight == 0:
            message.zero_()
        if self.rounding_errors and weight > 0:
            message.add_(self.rounding_errors[index], alpha=self.feedback_decay)
            self.rounding_errors[index].zero_()
        what = f"synchronizing {self.replica.blocks[index].name}"
        pending = self.replica_comms.start_all_reduce(message, what, self.wire, bool(self.rounding_errors))
        return PendingReduction(pending, self.rounding_errors[index] if self.rounding_errors else None)

    def completed_reduction(self, index: int, mean: torch.Tensor) -> PendingReduction:
        """Return a completed reduction of a block, for a mean that was loaded from a checkpoint. Its result is a copy of `mean`,
        because the outer step overwrites the mean that it uses."""
        device = self.replica.blocks[index].shards[0].device
        return PendingReduction(PendingCollective(self.replica_comms, "", None, mean.to(device, copy=True)))

    def outer_step(
        self,
        index: int,
        mean: torch.Tensor,
        local_steps: LocalSteps,
        factor: torch.Tensor | float | None = None,
        alpha: float = 0.0,
        squares: BlockSquares | None = None,
    ) -> None:
        """Take a block's outer step with `mean` x `factor`, and set the block's parameters from its result.

        `mean`, the reduced pseudo-gradient of these local steps, is overwritten. The parameters become alpha x their
        present values + (1 - alpha) x the point from which the outer optimizer continues, which is the next anchor unless
        `Outer.start` says otherwise. `squares`, if given, measures the block before the step.
        """
        block = self.replica.blocks[index]
        anchor, *state = self.anchors.load(index)
        # At the end of a run, the round number may be one too low for a fragment that takes its step early.
        outer = self.outer.in_round(self.rounds_done)
        parts = parts_of(parameter_parts(block), anchor, mean, *state)
        for parameters, anchor_part, mean_part, *state_parts in parts:
            if squares is not None:
                squares.add(anchor_part - parameters, mean_part)
            if factor is not None:
                mean_part.mul_(factor)
            outer.step(anchor_part, mean_part, state_parts, local_steps)
            start = outer.start(anchor_part, state_parts)
            parameters.copy_(torch.lerp(start, parameters.to(start.dtype), alpha) if alpha else start)
        self.anchors.write_back(index, [anchor, *state])
        self.replica.parameters_changed(block)

    def write_parameters(self, index: int, parameters: torch.Tensor) -> None:
        """Set the block's parameters to a flat tensor, and tell the replica that they have changed."""
        block = self.replica.blocks[index]
        unflatten_into(parameters, block)
        self.replica.parameters_changed(block)

    def reset_to_anchor(self, blocks: Sequence[int] | None = None) -> None:
        """Set the parameters of these blocks (default: all) to the result of the last synchronization: the anchor, unless
        `Outer.start` says otherwise. Requires anchors."""
        with_state = not self.outer.starts_at_anchor
        for index in self.anchors.iter_prefetched(self.blocks if blocks is None else blocks, with_state):
            anchor, *state = self.anchors.load(index) if with_state else [self.anchors.load_anchor(index)]
            self.write_parameters(index, self.outer.start(anchor, state))

    def end_at_anchor(self) -> None:
        """Set the parameters to the anchors and the outer optimizer's state to zero, at the end of a run. If the run is extended, it
        continues from this state. Do nothing if replicas always continue from the anchors."""
        if self.outer.starts_at_anchor or self.anchors is None or not self.anchors.is_set:
            return
        for index in self.anchors.iter_prefetched(self.blocks, with_state=True):
            anchor, *state = self.anchors.load(index)
            self.anchors.write_back(index, [anchor, *(tensor.zero_() for tensor in state)])
            self.write_parameters(index, anchor)

    def sync_blocks(self, blocks: Sequence[int], local_steps: LocalSteps) -> None:
        """Synchronize these blocks one after another, with equal weights. Afterwards, all replicas have the same parameters in them.
        Requires anchors. Schedules use this where their own order does not apply: at the end of a run, and for WAGMA's averages over
        all replicas, which end its rounds of group averages."""
        means = results_in_order((index, self.start_reduce(index)) for index in blocks)
        for _, (index, mean) in zip(self.anchors.iter_prefetched(blocks, with_state=True), means, strict=True):
            self.outer_step(index, mean, local_steps)


def _square(part: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squares of a part's values, in at least fp32."""
    flat = part.reshape(-1)
    if flat.element_size() < 4:
        flat = flat.float()  # the squared norm may exceed the range of fp16, and bf16 has only three digits
    return torch.dot(flat, flat)


def squared_norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squares of a flat tensor's values, a float64 scalar, summed in float64."""
    return torch.stack(exact_norms(tensor)).square().sum()


def _sum(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of scalars in float64."""
    return torch.stack(list(parts)).double().sum()
