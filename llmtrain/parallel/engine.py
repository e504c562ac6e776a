"""Interface between an engine, which runs one replica, and the rest of the package."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from llmtrain.loss import IGNORE_INDEX
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.device_time import DeviceTimer
from llmtrain.pieces import exact_norms
from llmtrain.trace import span

MicroBatch = torch.Tensor
"""Token ids [micro_batch, T + 1], int64. Inputs are all but the last, labels all but the first. T is sequence_length.
Without packing, T is the length of the longest document in the micro-batch, and shorter ones are padded on the right with
IGNORE_INDEX."""


def count_positions(micro_batches: Sequence[MicroBatch]) -> int:
    """Return the number of labels on this rank, padding included."""
    return sum(batch.shape[0] * (batch.shape[1] - 1) for batch in micro_batches)


def count_tokens(micro_batches: Sequence[MicroBatch]) -> int:
    """Return the number of labels on this rank that are not padding."""
    return sum(int((batch[:, 1:] != IGNORE_INDEX).sum()) for batch in micro_batches)


@dataclass
class Block:
    """Unit of the model that is gathered and synchronized on its own. `shards` are this rank's parts of its master
    weights, in a fixed order. A synchronization changes them in place and then calls `Replica.parameters_changed`."""

    name: str
    shards: list[torch.Tensor]
    parameter_names: list[str] = field(default_factory=list)
    """The parameters' full names in the model, in the order of `shards`. With ZeRO, a shard holds several
    parameters."""
    flat: torch.Tensor | None = None
    """Flat tensor that `shards` are views of, end to end; None if the shards do not share one."""


Keep = Callable[[torch.Tensor], torch.Tensor]
"""Function that returns what to keep of a tensor, such as a copy in CPU memory."""


def as_is(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself."""
    return tensor


def gradient_norm(gradients: Sequence[torch.Tensor], shard: Comms, exact: bool) -> torch.Tensor:
    """Return the L2 norm of a replica's gradients, given this rank's parts of them: a scalar on their device, in at
    least fp32. A collective of the shard group.

    With `exact`, squares are summed in float64 and the norm is rounded once. It then does not depend on the order of summation,
    which differs between devices. Replicas that average their gradients need exact norms, because all must clip by the same norm.
    """
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    if exact:
        norms = [norm for gradient in gradients for norm in exact_norms(gradient.reshape(-1))]
        squared = torch.stack(norms).square().sum()
    elif gradients[0].dtype == wide:
        squared = torch.nn.utils.get_total_norm(gradients).double().square()
    else:  # torch would round the norm to the gradients' dtype
        norms = [torch.linalg.vector_norm(gradient, dtype=wide) for gradient in gradients]
        squared = torch.stack(norms).double().square().sum()
    return shard.all_reduce(squared, "summing gradient norms").sqrt().to(wide)


class Replica(ABC):
    """One replica as synchronization sees it: parameter blocks that are read and changed between steps or in block hooks."""

    blocks: list[Block]
    """All blocks, in forward order."""
    average_gradients: bool = True
    """True in a synchronous step, in which gradients are also averaged over the replicas. The method sets it before each step.
    The engines of torch (FSDP2 and a single device) overlap the averaging with backward; ZeRO averages in `step`."""

    @abstractmethod
    def register_block_hook(self, hook: Callable[[int], None]) -> None:
        """Register `hook`. Every training forward calls `hook(index)` before block `index` is gathered, except that ZeRO's
        stages 1 and 2 call it for all blocks at the start of a step."""

    @abstractmethod
    def parameters_changed(self, block: Block) -> None:
        """Make the next forward compute with `block.shards`, which the caller has changed."""

    @abstractmethod
    def moments(self, index: int, order: int) -> list[torch.Tensor | None]:
        """Return this rank's parts of the inner optimizer's first (`order` 1) or second (2) moments of block `index`, one
        tensor per tensor that the optimizer updates; None for one that has no such moment. The caller may change them in
        place. They are known after the optimizer's first step at the latest."""


class Engine(Replica):
    """Base class of engines: forward, backward and inner optimizer of one replica, over the ranks of a shard group."""

    skipped: torch.Tensor | int = 0
    """1 if the last step was skipped because its gradient was not finite, otherwise 0. A scalar on the device unless
    `optim.nonfinite` is stop. Equal on all ranks of a replica."""
    returns_copies = False
    """True if `state_dict` and `to_dtensors` return copies in the device's memory."""
    gradient_wait: DeviceTimer
    """Time that training spends, after backward, waiting for gradients to be averaged over the replicas."""

    @contextmanager
    def time_gradient_wait(self) -> Iterator[None]:
        """Count the enclosed code as waiting for gradients to be averaged over the replicas."""
        with span("exposed", "averaging gradients"), self.gradient_wait.measure():
            yield

    @abstractmethod
    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], replica_tokens: float | None = None
    ) -> torch.Tensor:
        """Compute the gradients of the replica's loss for one step. Return this rank's summed loss, a scalar on the device.

        For the gradients, the replica's summed loss is divided by `replica_tokens`. In a synchronous step, this is the
        number of tokens in the global batch divided by the number of replicas. The mean of the replicas' gradients is
        then the gradient of the mean loss over all tokens of the global batch, however unequally the tokens are
        distributed over the ranks. In a local step, this number is multiplied by the replica's share of the batch
        relative to the mean share. None means that all ranks have as many tokens as this one, without padding.
        """

    @abstractmethod
    def step(self, lr: float) -> torch.Tensor:
        """Clip the gradients, update the parameters with the inner optimizer, and drop the gradients. Return the replica's
        gradient norm before clipping, a scalar on the device."""

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
        """Return a context manager that yields a function from (input_ids, labels), each [B, T], to the summed loss, without
        gradients and dropout. Block hooks are not called within it."""

    @abstractmethod
    def state_dict(self, keep: Keep = as_is) -> dict[str, torch.Tensor]:
        """Return `keep` of this replica's weights and optimizer state by name, as DTensors except for step counts.
        Names are `weights.<parameter>` and `optimizer.<parameter>.<key>`, the same with every engine. A
        collective of the shard group."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the state that `state_dict` returned."""

    @abstractmethod
    def to_dtensors(self, block: Block, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Convert a flat tensor, such as an anchor, that is laid out like `block.shards` end to end. Return its DTensors
        by parameter name, sharded by rows whatever the engine's own layout. A collective of the shard group."""

    @abstractmethod
    def from_dtensors(self, block: Block, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Invert `to_dtensors`: return this rank's flat tensor, given DTensors by parameter name, such as those of a
        checkpoint. A collective of the shard group."""

    @abstractmethod
    def full_weights(self) -> dict[str, torch.Tensor]:
        """Return the replica's full weights by transformers' names, on the CPU of the shard group's first rank. The
        other ranks return an empty dict. A collective of the shard group."""
