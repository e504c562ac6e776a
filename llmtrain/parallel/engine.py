"""What the rest of the package knows of an engine: the thing that runs one replica."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from llmtrain.parallel.comms import Comms
from llmtrain.trace import span

MicroBatch = torch.Tensor
"""Token ids [micro_batch, sequence_length + 1]: inputs are all but the last, labels all but the first."""


@dataclass
class Block:
    """A unit that is gathered and synchronized on its own. `shards` are this rank's master tensors, in a fixed
    order; a synchronization changes them in place and then tells the engine (`publish`)."""

    name: str
    shards: list[torch.Tensor]
    parameter_names: list[str] = field(default_factory=list)
    """The whole model's name of each shard's parameter."""


def gradient_norm(gradients: Sequence[torch.Tensor], shard: Comms) -> torch.Tensor:
    """Return the L2 norm over a replica's gradients, of which this rank has the given parts; on the device, in their dtype.

    Summed in float64 and rounded once: all replicas must clip by the same number, and other GPUs sum in another order.
    A collective of the shard group.
    """
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    squares = shard.all_reduce(torch.stack(norms).square().sum(), "summing gradient norms")
    return squares.wait().sqrt().to(gradients[0].dtype)


class Engine(ABC):
    """One replica: forward, backward and the inner optimizer over the ranks of a shard group."""

    blocks: list[Block]
    """In forward order."""
    average_gradients: bool = True
    """Synchronous phase: gradients are averaged over the replicas too, overlapped with backward."""
    skipped: bool = False
    """Whether the last step was left out because its gradient was not finite. Equal on the ranks of a replica."""
    gradient_wait_seconds: float = 0.0
    """How long steps have waited for that so far."""

    @contextmanager
    def time_gradient_wait(self) -> Iterator[None]:
        """Within it a step waits for gradients to be averaged over the replicas."""
        started = time.monotonic()
        with span("exposed", "averaging gradients"):
            yield
        self.gradient_wait_seconds += time.monotonic() - started

    @abstractmethod
    def register_block_hook(self, hook: Callable[[int], None]) -> None:
        """Call `hook(index)` in every training forward, before block `index` is gathered."""

    @abstractmethod
    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Gradients of the replica's mean loss for one step. Returns this rank's summed loss, still on the device."""

    @abstractmethod
    def step(self, lr: float) -> torch.Tensor:
        """Clip, update with the inner optimizer, drop the gradients. Returns the replica's gradient norm before
        clipping, still on the device."""

    @abstractmethod
    def parameters_changed(self, block: Block) -> None:
        """`block.shards` were changed: make what the next forward computes with follow."""

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
        """Within it, the given function returns summed losses of (input_ids, labels); hooks are not called."""

    @abstractmethod
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Weights and optimizer state of this replica by name, as tensors that know their shards: `weights.<parameter>`,
        `optimizer.<parameter>.<key>`, the same with every engine. A collective of the shard group."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """The inverse; `state` has what `state_dict` returned."""

    @abstractmethod
    def to_dtensors(self, block: Block, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """A flat tensor shaped like `block.shards` end to end (an anchor, say) as tensors by parameter name that know
        their shards: rows, whatever the engine's own layout is. A collective of the shard group."""

    @abstractmethod
    def from_dtensors(self, block: Block, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The inverse of `to_dtensors`: a flat tensor, from the sharded ones after they were loaded. A collective of the
        shard group."""

    @abstractmethod
    def full_weights(self) -> dict[str, torch.Tensor]:
        """The replica's whole weights by transformers' names, on the CPU of the shard group's first rank (empty on
        the others). A collective of the shard group."""
