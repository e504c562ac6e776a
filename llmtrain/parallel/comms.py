"""Collectives along one axis of the mesh: the only place that sends, so bytes and seconds are counted once.

Bytes are what one rank sends with the ring algorithm: 2 (n-1)/n of the tensor in an all-reduce, (n-1) times
its own tensor in an all-gather.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from llmtrain.errors import TrainingError


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone or too late, and not for a fault in the program."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


@dataclass
class Traffic:
    """What went over one axis so far, on this rank."""

    bytes: float = 0.0
    seconds: float = 0.0
    """Waiting for messages to complete, on this rank's main thread."""


class Pending:
    """A collective under way. `wait` makes its result safe to use on the current stream."""

    def __init__(self, comms: Comms, what: str, work: dist.Work | None, result: torch.Tensor):
        self._comms, self._what, self._work, self.result = comms, what, work, result

    @property
    def is_done(self) -> bool:
        """The result is there; `wait` will not block."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> torch.Tensor:
        """The result. Raises TrainingError, naming the axis and this rank, when a peer is gone or too late."""
        if self._work is not None:
            started = time.perf_counter()
            try:
                self._work.wait()
            except RuntimeError as error:
                raise self._comms.failure(self._what, error) from error
            self._comms.traffic.seconds += time.perf_counter() - started
            self._work = None
        return self.result


class Comms:
    """The ranks along one axis of the mesh. With `group=None`, or one rank, nothing is sent.

    `axis` is what messages call it ("replica", "shard"). `device` is where the tensors are that its backend sends
    best: gloo gathers on the CPU only.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device | None = None, axis: str = "replica"):
        self.group, self.axis = group, axis
        over_gloo = group is not None and dist.get_backend(group) == dist.Backend.GLOO
        self.device = torch.device("cpu") if over_gloo or device is None else device
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.traffic = Traffic()

    def all_reduce(self, tensor: torch.Tensor, what: str = "all-reduce") -> Pending:
        """Start summing `tensor` over the axis, in place; do not touch it before `wait`."""
        if self.size == 1:
            return Pending(self, what, None, tensor)
        self.traffic.bytes += 2 * (self.size - 1) / self.size * tensor.numel() * tensor.element_size()
        try:
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self.failure(what, error) from error
        return Pending(self, what, work, tensor)

    def gather(self, tensor: torch.Tensor, what: str = "all-gather") -> Pending:
        """Start collecting every rank's `tensor` (equal shapes) in rank order: [size, *shape] on every rank."""
        gathered = tensor.new_empty((self.size, *tensor.shape))
        if self.size == 1:
            gathered[0] = tensor
            return Pending(self, what, None, gathered)
        self.traffic.bytes += (self.size - 1) * tensor.numel() * tensor.element_size()
        try:
            work = dist.all_gather(list(gathered.unbind(0)), tensor, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self.failure(what, error) from error
        return Pending(self, what, work, gathered)

    def all_gather(self, tensor: torch.Tensor, what: str = "all-gather") -> torch.Tensor:
        """Every rank's `tensor`, stacked in rank order: [size, *shape]."""
        return self.gather(tensor, what).wait()

    def failure(self, what: str, error: Exception) -> TrainingError:
        """One line that says what was being exchanged, by whom, and what the backend reported."""
        reason = " ".join(str(error).split("\n")[0].split())
        me = f"rank {dist.get_rank()} ({self.axis} {self.rank} of {self.size})"
        return TrainingError(
            f"{what} over the {self.axis} axis failed on {me}: {reason}; a peer died or took longer than run.timeout_seconds"
        )
