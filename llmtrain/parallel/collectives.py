"""Collectives in flight, started by `Comms`: plain collectives, and all-reduces in parts, of rounded values, and of the largest
values. The last two can report the error of a message, for error feedback."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.distributed as dist

from llmtrain.config import PREFETCH
from llmtrain.parallel.sparse_format import SparseFormat
from llmtrain.parallel.wire_format import WireFormat

if TYPE_CHECKING:
    from llmtrain.parallel.comms import Comms
    from llmtrain.parallel.exchanges import CollectiveExchange, PeerExchange

T = TypeVar("T")


class PendingCollective:
    """A collective in flight. After `wait`, its result is safe to use on the current stream."""

    def __init__(self, comms: Comms, what: str, work: dist.Work | None, result: torch.Tensor):
        """Wrap the `work` that fills `result`. `work` is None if the result is complete already."""
        self._comms, self._what, self._work, self.result = comms, what, work, result

    @property
    def is_done(self) -> bool:
        """True if the result is available, so that `wait` will not block."""
        return self._work is None or self._work.is_completed()

    def start_second_phase(self) -> None:
        """Start the second phase, if the collective has one. All ranks must call this at the same place in their
        sequence of collectives."""

    def wait(self) -> torch.Tensor:
        """Wait for the result and return it. Raises TrainingError, which names the axis and this rank, if a peer died
        or was too late."""
        self._finish()
        return self.result

    def quantization_error(self) -> torch.Tensor | None:
        """Return the error that this rank has to add to its next message for error feedback, as a flat tensor: the parts of its
        message, and of its chunk of the sum, that the format did not send. None if the message was sent unchanged, if the error is
        not kept, or if it was returned before. Call after `wait`."""
        return None

    def _finish(self) -> None:
        if self._work is None:
            return
        try:
            with self._comms.traffic.waiting.measure():
                self._work.wait()
        except RuntimeError as error:
            raise self._comms.failure(self._what, error) from error
        self._comms.end_work(self._work)
        self._work = None


class SplitAllReduce(PendingCollective):
    """All-reduce (sum) of a tensor in one part per connection, so that the parts wait for their receivers at the same time."""

    def __init__(self, comms: Comms, what: str, tensor: torch.Tensor):
        super().__init__(comms, what, None, tensor)
        self._parts = [comms.start_plain_all_reduce(part, what) for part in tensor.view(-1).chunk(len(comms.groups))]

    @property
    def is_done(self) -> bool:
        return all(part.is_done for part in self._parts)

    def _finish(self) -> None:
        for part in self._parts:
            part.wait()


class QuantizedAllReduce(PendingCollective):
    """All-reduce (sum) of rounded values in two phases, each an exchange. In the first, each rank receives its chunk of every
    rank's message and sums these chunks. In the second, it sends its sum, rounded again, to all ranks. All ranks end with the
    same bits, because they decode the same messages. In flight, the collective takes the memory of the encoded bytes."""

    def __init__(self, comms: Comms, what: str, tensor: torch.Tensor, wire: WireFormat, keeps_error: bool = False):
        """Start the first exchange. With `keeps_error`, keep the rounding error, which takes as much memory as the message."""
        super().__init__(comms, what, None, tensor.new_empty(0))
        self._wire, self._shape = wire, tensor.shape
        chunk = wire.padded_chunk(tensor.numel(), comms.size)
        first, self._second = (comms.open_exchange(what, wire.size(chunk)) for _ in range(2))
        message = tensor.new_zeros(comms.size, chunk)
        message.view(-1)[: tensor.numel()] = tensor.reshape(-1)
        encoded = wire.encode(message)
        self._first: CollectiveExchange | PeerExchange | None = first
        self._work = first.send_parts(encoded.to(comms.device))
        self._error = message.sub_(wire.decode(encoded, message.dtype)) if keeps_error else None

    @property
    def is_done(self) -> bool:
        return self._first is None and super().is_done

    def start_second_phase(self) -> None:
        """Wait for the first exchange, then start the second. Later calls do nothing."""
        if self._first is None:
            return
        self._finish()
        total = self._decoded(self._first).sum(0, keepdim=True)  # this rank's chunk of the sum
        encoded = self._wire.encode(total)
        self._work = self._second.send_to_all(encoded.to(self._comms.device).view(-1))
        if self._error is not None:
            # The second exchange rounds the sum of this rank's chunk, and only this rank knows the error of that rounding.
            self._error[self._comms.rank] += (total - self._wire.decode(encoded, total.dtype)).view(-1)
        self._first = None  # frees what was received

    def wait(self) -> torch.Tensor:
        self.start_second_phase()
        self._finish()
        if self._second is not None:
            self.result = self._decoded(self._second).view(-1)[: self._shape.numel()].view(self._shape)
            self._second = None
        return self.result

    def quantization_error(self) -> torch.Tensor | None:
        error, self._error = self._error, None
        return None if error is None else error.view(-1)[: self._shape.numel()]

    def _decoded(self, exchange: CollectiveExchange | PeerExchange) -> torch.Tensor:
        return self._wire.decode(exchange.received.to(self.result.device), self.result.dtype)


class SparseAllReduce(PendingCollective):
    """All-reduce (sum) in one exchange: each rank sends the largest values of its message to all other ranks, and sums
    what it receives. All ranks end with the same bits, because they sum the same messages in the same order."""

    def __init__(self, comms: Comms, what: str, tensor: torch.Tensor, wire: SparseFormat):
        """Start the exchange. `tensor` is overwritten with the values that are not sent."""
        super().__init__(comms, what, None, tensor.new_empty(0))
        self._wire, self._shape = wire, tensor.shape
        part_bytes = wire.size(tensor.numel(), tensor.element_size())
        self._exchange: CollectiveExchange | PeerExchange | None = comms.open_exchange(what, part_bytes)
        encoded = wire.encode(tensor.view(-1))
        # Negate, add what is sent, and negate again: the message minus what is sent, in the message's own memory.
        wire.add_decoded(encoded, tensor.neg_().view(-1))
        self._error: torch.Tensor | None = tensor.neg_()
        self._work = self._exchange.send_to_all(encoded.to(comms.device))

    def wait(self) -> torch.Tensor:
        self._finish()
        if self._exchange is not None:
            total = self.result.new_zeros(self._shape)
            for encoded in self._exchange.received.to(total.device):
                self._wire.add_decoded(encoded, total.view(-1))
            self.result, self._exchange = total, None
        return self.result

    def quantization_error(self) -> torch.Tensor | None:
        error, self._error = self._error, None
        return None if error is None else error.view(-1)


class PendingResult(Protocol):
    """A result in flight, of one or two phases."""

    def start_second_phase(self) -> None:
        """Start the second phase, if there is one."""

    def wait(self) -> torch.Tensor:
        """Wait for the result and return it."""


def results_in_order(started: Iterator[tuple[T, PendingResult]]) -> Iterator[tuple[T, torch.Tensor]]:
    """Yield (item, result) for each collective that `started` starts as it is advanced. During the wait for one
    collective, the next PREFETCH are in flight, and the next one is already in its second phase."""
    in_flight = deque(islice(started, PREFETCH + 1))
    while in_flight:
        for _, near in islice(in_flight, 2):
            near.start_second_phase()
        item, pending = in_flight.popleft()
        result = pending.wait()
        in_flight.extend(islice(started, 1))
        yield item, result
