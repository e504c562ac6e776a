"""Collectives along one axis of the mesh. Every collective that llmtrain starts itself goes through `Comms`, so bytes and
seconds are counted in one place. Collectives of objects, and those that FSDP2, DeepSpeed and DTensor start, are not counted.

The count is what one of n ranks sends with the ring algorithm: 2 (n-1)/n of the tensor in an all-reduce, and (n-1)
times its own tensor in an all-gather. With a wire format of rounded values, an all-reduce has two exchanges, and each
sends (n-1)/n of the encoded bytes. With a sparse format it has one exchange, an all-gather of the encoded bytes.

The argument `what` of each collective is its label in errors and traces.
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from llmtrain import trace
from llmtrain.errors import TrainingError, one_line
from llmtrain.parallel.collectives import PendingCollective, QuantizedAllReduce, SparseAllReduce, SplitAllReduce
from llmtrain.parallel.device_time import DeviceTimer
from llmtrain.parallel.exchanges import ALL_GATHER, CollectiveExchange, PeerExchange
from llmtrain.parallel.network import using_interface
from llmtrain.parallel.sparse_format import SparseFormat
from llmtrain.parallel.wire_format import WireFormat
from llmtrain.reshard import Rules, mean, split_evenly

T = TypeVar("T")
AnyFormat = WireFormat | SparseFormat
"""Formats that encode a message before it is sent."""

HOP_BYTES = 2 << 20
"""Maximum bytes that gloo's all-reduce sends between two waits for the receiver: it has two segments of at most 1 MiB in flight."""

MESSAGE_LENGTH = 400
"""Number of characters of a backend's error message that are shown: enough for NCCL's reason, without most of the C++
stack trace."""
OWN_FAULTS = ("out of memory", "invalid usage")
"""Parts of NCCL's error messages that mean that this rank itself has failed, not a peer."""


def is_lost_peer(error: RuntimeError) -> bool:
    """Return whether a collective failed because a peer died or was too late, and not because of a bug or a lack of
    memory on this rank."""
    return (isinstance(error, dist.DistError) or "gloo" in str(error)) and not is_own_fault(error)


def is_own_fault(error: Exception) -> bool:
    """Return whether a backend reports a failure of this rank alone."""
    return any(fault in str(error) for fault in OWN_FAULTS)


TRAFFIC_RULES: Rules = {"bytes": split_evenly, "seconds": mean}
"""Resharding rules for `Traffic.state_dict`."""


class Traffic:
    """Running totals of the bytes that this rank has sent over one axis, and of the seconds that it has waited."""

    def __init__(self, device: torch.device | None = None):
        """Start at 0. Waiting is measured on `device`; if it is None or a CPU, on the calling thread."""
        self.bytes = 0.0
        self.waiting = DeviceTimer(device)
        """Time that the device, or on a CPU the calling thread, has waited for collectives to complete."""

    def state_dict(self) -> dict[str, float]:
        """Return the totals so far by name."""
        return {"bytes": self.bytes, "seconds": self.waiting.seconds}

    def load(self, bytes: float, seconds: float) -> None:
        """Continue from the counts of a checkpoint."""
        self.bytes = bytes
        self.waiting.load(seconds)


class Comms:
    """Communicator for the ranks along one axis of the mesh. With `group=None` or a single rank, it sends nothing.

    Methods that only start a collective are named `start_...` and return an object with a `wait` method. The other
    methods wait for the result.

    The argument `device` is the device that trains, kept as `training_device`; waiting is measured on it. The attribute
    `device` is where tensors to send must be: the CPU with gloo, which gathers only CPU tensors, otherwise the training
    device. `axis` is the axis's name in error messages ("replica", "shard"). `interface` is the network interface for
    groups along this axis, or None to leave the choice to the backend. All-reduces that are in flight at once, and the
    parts of large ones, are spread over `groups`: `group` and the groups that `add_groups` adds.
    """

    shares_memory = False
    """True if the ranks are threads of one process, which pass objects to each other without copies."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device | None = None,
        axis: str = "replica",
        interface: str | None = None,
    ):
        self.group, self.axis, self.interface = group, axis, interface
        self.groups = [group]
        self._in_flight: list[list[dist.Work]] = [[]]
        self.is_gloo = group is not None and dist.get_backend(group) == dist.Backend.GLOO
        self.training_device = device or torch.device("cpu")
        self.device = torch.device("cpu") if self.is_gloo else self.training_device
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.traffic = Traffic(self.training_device)

    def with_own_traffic(self) -> Comms:
        """Return a communicator for the same group, with counters of its own."""
        other = copy.copy(self)
        other.traffic = Traffic(self.training_device)
        return other

    def add_groups(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Use more process groups of the same ranks, each with its own connections. Every rank begins collectives and
        waits for them in the same order, so all ranks choose the same group for a collective."""
        self.groups += groups
        self._in_flight += [[] for _ in groups]

    def connect(self) -> None:
        """Let NCCL allocate its buffers now. It would otherwise do so at the first collective of each kind, when torch has
        reserved nearly all memory. Not counted as traffic. A collective of the ranks of this axis."""
        if self.size == 1 or self.device.type != "cuda":
            return
        uncounted, zeros = self.with_own_traffic(), torch.zeros(self.size, device=self.device)
        uncounted.all_reduce(zeros[:1], "connecting")
        uncounted.all_gather(zeros[:1], "connecting")
        uncounted.start_all_to_all(zeros.split(1), [1] * self.size, "connecting").wait()
        torch.cuda.synchronize(self.device)

    def start_all_reduce(
        self, tensor: torch.Tensor, what: str = "all-reduce", wire: AnyFormat | None = None, keeps_error: bool = False
    ) -> PendingCollective:
        """Start summing `tensor` over the axis. `wire` is the format in which values are sent. None sends them as they are, and the
        sum replaces them; the caller must not touch `tensor` before `wait`. With a format, the sum has its own memory, and with
        `keeps_error` the error of this rank's message is kept (`PendingCollective.quantization_error`). A sparse format always keeps
        the error, in the memory of `tensor`."""
        if self.size == 1 or tensor.numel() == 0:
            return PendingCollective(self, what, None, tensor)
        if isinstance(wire, SparseFormat):
            return SparseAllReduce(self, what, tensor, wire)
        if wire is not None:
            return QuantizedAllReduce(self, what, tensor, wire, keeps_error)
        if len(self.groups) > 1 and tensor.nbytes > self.size * HOP_BYTES:
            return SplitAllReduce(self, what, tensor)
        return self.start_plain_all_reduce(tensor, what)

    def start_plain_all_reduce(self, tensor: torch.Tensor, what: str) -> PendingCollective:
        """Start summing `tensor` over the axis, in place, unrounded and on one connection."""
        sent = 2 * (self.size - 1) / self.size * tensor.numel() * tensor.element_size()
        return PendingCollective(self, what, self.start_work(what, sent, dist.all_reduce, tensor), tensor)

    def start_all_gather(self, tensor: torch.Tensor, what: str = "all-gather") -> PendingCollective:
        """Start an all-gather of every rank's `tensor` (equal shapes) in rank order. The result is [size, *shape]."""
        gathered = tensor.new_empty((self.size, *tensor.shape))
        if self.size == 1:
            gathered[0] = tensor
            return PendingCollective(self, what, None, gathered)
        sent = (self.size - 1) * tensor.numel() * tensor.element_size()
        flat = gathered.view(-1), tensor.reshape(-1)  # gloo requires both to be flat
        work = self.start_work(what, sent, ALL_GATHER, *flat)
        return PendingCollective(self, what, work, gathered)

    def start_all_to_all(self, parts: Sequence[torch.Tensor], received: Sequence[int], what: str) -> PendingCollective:
        """Start an all-to-all: send the flat tensor `parts[r]` to each rank r, and receive `received[r]` values of the
        same dtype from it. The result has the received values end to end, in rank order."""
        if self.size == 1:
            return PendingCollective(self, what, None, parts[0])
        message = torch.cat(list(parts)).to(self.device)
        result = message.new_empty(sum(received))
        width = message.element_size()
        # The tensors are exchanged as bytes, because backends support few dtypes.
        splits = [[width * values for values in received], [width * part.numel() for part in parts]]
        sent = sum(splits[1]) - splits[1][self.rank]
        buffers = [tensor.view(torch.uint8) for tensor in (result, message)]
        work = self.start_work(what, sent, dist.all_to_all_single, *buffers, *splits)
        return PendingCollective(self, what, work, result)

    def all_reduce(self, tensor: torch.Tensor, what: str = "all-reduce", wire: AnyFormat | None = None) -> torch.Tensor:
        """Return the sum of `tensor` over the axis. It replaces `tensor` as in `start_all_reduce`."""
        return self.start_all_reduce(tensor, what, wire).wait()

    def all_gather(self, tensor: torch.Tensor, what: str = "all-gather") -> torch.Tensor:
        """Return every rank's `tensor`, stacked in rank order: [size, *shape]."""
        return self.start_all_gather(tensor, what).wait()

    def all_gather_object(self, value: T, what: str) -> list[T]:
        """Return every rank's `value`, which must be picklable, in rank order. Not counted as traffic. Raises
        TrainingError as `PendingCollective.wait` does."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            self._named(what, dist.all_gather_object, values, value)
        return values

    def broadcast_object(self, value: T, what: str) -> T:
        """Return rank 0's `value` on every rank. Counting and errors are as in `all_gather_object`."""
        values = [value]
        if self.size > 1:
            self._named(what, partial(dist.broadcast_object_list, group_src=0), values)
        return values[0]

    def _named(self, what: str, collective: Callable[..., None], *objects: Any) -> None:
        try:
            collective(*objects, group=self.group)
        except RuntimeError as error:
            raise self.failure(what, error) from error

    def start_work(self, what: str, sent: float, collective: Callable[..., dist.Work], *tensors: Any) -> dist.Work:
        """Start a torch.distributed collective over this axis, with `tensors` as its arguments, and count the `sent` bytes that
        this rank sends."""
        arrived = self.note_message(what, sent)
        # Collectives other than all-reduces wait for one round trip only. If they were spread over the connections,
        # each connection would be used only now and then, and TCP would start slowly every time.
        number = self._least_used() if collective is dist.all_reduce else 0
        try:
            work = collective(*tensors, group=self.groups[number], async_op=True)
        except RuntimeError as error:
            raise self.failure(what, error) from error
        if len(self.groups) > 1:
            self._in_flight[number].append(work)
        if arrived is not None:
            # NCCL completes a future as soon as its work is enqueued, and calls back in a stream that waits for the work.
            work.get_future().add_done_callback(lambda future: arrived())
        return work

    def note_message(self, what: str, sent: float) -> Callable[[], None] | None:
        """Count `sent` bytes, and return a function to call when the message has arrived; None if no trace is recorded."""
        self.traffic.bytes += sent
        return trace.message(what, sent, self.device.type == "cuda") if self.axis == "replica" else None

    def open_exchange(self, what: str, part_bytes: int) -> CollectiveExchange | PeerExchange:
        """Return an exchange in which each rank sends `part_bytes` bytes on `device` to every other rank. Over gloo,
        the exchange is ready to receive at once, so open it before you compute what is sent."""
        return PeerExchange(self, what, part_bytes) if self.is_gloo else CollectiveExchange(self, what, part_bytes)

    def _least_used(self) -> int:
        """Return the number of the first group among those with the fewest collectives in flight."""
        return min(range(len(self.groups)), key=lambda number: len(self._in_flight[number]))

    def end_work(self, work: dist.Work) -> None:
        """Note that this rank has waited for a collective."""
        for works in self._in_flight:
            works[:] = (other for other in works if other is not work)

    def among(self, lists: Sequence[Sequence[int]], rank: int, axis: str, timeout_seconds: float) -> Comms:
        """Create a gloo group for CPU tensors for each list of ranks, and return the communicator of the list that contains
        `rank`, this rank. If this list has no other rank, the communicator sends nothing. A collective of all ranks.

        This is a method, although it does not use `self`, so that tests with replicas in threads can override it.
        """
        mine = None
        for ranks in lists:  # every rank must take part in creating every group
            if len(ranks) > 1:
                group = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=timeout_seconds))
                mine = group if rank in ranks else mine
        return Comms(mine, axis=axis)

    def failure(self, what: str, error: Exception) -> TrainingError:
        """Return a TrainingError in one line that names the collective, this rank, and the backend's reason. NCCL's is in the
        last lines of its message."""
        reason = one_line(error, MESSAGE_LENGTH)
        me = f"rank {dist.get_rank()} ({self.axis} {self.rank} of {self.size}) on {socket.gethostname()}"
        of_peer = "" if is_own_fault(error) else "; a peer died or took longer than run.timeout_seconds"
        return TrainingError(f"{what} over the {self.axis} axis failed on {me}: {reason}{of_peer}")


def make_replica_groups(
    replica_comms: Comms, shard_comms: Comms, partition: Sequence[Sequence[int]], timeout_seconds: float
) -> Comms:
    """Create a process group for each shard of each group of replicas, and return this rank's communicator. A
    collective of all ranks.

    `partition` lists disjoint groups of replica numbers that together cover all replicas.
    """
    lists = [[r * shard_comms.size + s for r in group] for s in range(shard_comms.size) for group in partition]
    with using_interface(replica_comms.interface):
        return replica_comms.among(
            lists, replica_comms.rank * shard_comms.size + shard_comms.rank, "group", timeout_seconds
        )


def shard_group(replica_comms: Comms, shard_comms: Comms, timeout_seconds: float) -> Comms:
    """Create a second group per replica, for CPU tensors, and return this rank's communicator. A collective of all ranks."""
    lists = [[r * shard_comms.size + s for s in range(shard_comms.size)] for r in range(replica_comms.size)]
    with using_interface(shard_comms.interface):
        return shard_comms.among(
            lists, replica_comms.rank * shard_comms.size + shard_comms.rank, "shard", timeout_seconds
        )
