"""Group averages of the replicas of one process, timed by their virtual clocks (WAGMA, arXiv 2005.00124).

All replicas know the durations of all steps. They therefore know in advance which replicas are late, and which message
each replica contributes to each average. The replica that has the turn may be ahead of the others or behind them,
because it waits until the messages that it needs are published. The results are those that `GroupAverager`'s threads
would produce if steps took exactly these durations and messages took no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from llmtrain.parallel.comms import Traffic
from llmtrain.parallel.wire_format import WireFormat
from llmtrain.sync.schedules.group_averager import Payloads, copy_of
from llmtrain.turns import Turns


class SharedAverages:
    """Messages and sums of all replicas of a process. Iterations run in order, each as soon as its messages are published."""

    def __init__(
        self,
        turns: Turns,
        groups_at: Callable[[int], list[list[int]]],
        is_global: Callable[[int], bool],
        seconds_of: Callable[[int, int], float],
        wire: WireFormat | None,
    ):
        """Share between the threads of `turns`. `groups_at(iteration)` lists the groups of replicas, `is_global(iteration)` says
        whether all replicas average instead, and `seconds_of(replica, iteration)` is the virtual duration of a step."""
        self.turns, self.groups_at, self.is_global, self.seconds_of = turns, groups_at, is_global, seconds_of
        self.wire = wire
        self.posted: list[dict[int, Payloads]] = [{} for _ in range(turns.count)]
        """Messages by replica and iteration, without those that can no longer be contributed."""
        self.sums: dict[tuple[int, int], tuple[Payloads, int]] = {}
        """Sum of a replica's group and iteration of the replica's message in this sum, by (iteration, replica)."""
        self._arrivals: list[deque[tuple[int, float]]] = []
        """Iterations and arrival times (seconds since the last global average) of the message that a replica contributes next
        and of its later messages, by replica."""
        self._iteration: int | None = None  # the next one to run

    def start(self, replica: int, iteration: int, message: Payloads) -> None:
        """Let a replica begin at `iteration` with its message of the previous iteration. All replicas begin at the same
        iteration."""
        self.posted[replica][iteration - 1] = message
        if self._iteration is None:
            self._begin_round(iteration - 1)
        self._run_all_due()

    def publish(self, replica: int, iteration: int, message: Payloads) -> None:
        """Add a replica's message, and run the iterations that waited only for it."""
        self.posted[replica][iteration] = message
        self._run_all_due()

    def collect(self, replica: int, iteration: int) -> tuple[Payloads, int]:
        """Return (a copy of the group's sum, iteration of the replica's message in it). Let other replicas run until
        the sum exists. On a GPU, messages are in pinned memory. The copy is then pinned, too, so that the host need not
        wait while it is copied to the GPU."""
        key = (iteration, replica)
        self.turns.wait_for(lambda: key in self.sums, lambda: f"the group's sum of iteration {iteration}")
        total, version = self.sums.pop(key)
        newest = self.posted[replica][max(self.posted[replica])]
        return [copy_of(part, own) for part, own in zip(total, newest, strict=True)], version

    def _run_all_due(self) -> None:
        while self._run_if_due():
            pass
        with self.turns.changed:
            self.turns.changed.notify_all()

    def _run_if_due(self) -> bool:
        """Run the next iteration if all of its messages are published, and return whether they are."""
        iteration = self._iteration
        if self.is_global(iteration):
            if not all(iteration in posted for posted in self.posted):
                return False
            self._forget_before([iteration] * self.turns.count)
            self._begin_round(iteration)
            return True
        versions = [arrivals[0][0] for arrivals in self._arrivals]
        if not all(version in posted for version, posted in zip(versions, self.posted, strict=True)):
            return False
        for group in self.groups_at(iteration):
            messages = [self.posted[member][versions[member]] for member in group]
            total = [summed(parts, self.wire) for parts in zip(*messages, strict=True)]
            self.sums |= {(iteration, member): (total, versions[member]) for member in group}
        self._forget_before(versions)
        self._schedule(iteration + 1)
        return True

    def _begin_round(self, common: int) -> None:
        """Begin a round after iteration `common`, which all replicas completed at the same virtual time."""
        self._arrivals = [deque([(common, 0.0)]) for _ in range(self.turns.count)]
        self._schedule(common + 1)

    def _schedule(self, iteration: int) -> None:
        """Set the next iteration. It starts when the first replica arrives at it. Every replica contributes the newest
        message that it has published by then."""
        self._iteration = iteration
        for replica, arrivals in enumerate(self._arrivals):
            arrivals.append((iteration, arrivals[-1][1] + self.seconds_of(replica, iteration)))
        start = min(arrivals[-1][1] for arrivals in self._arrivals)
        for arrivals in self._arrivals:
            while len(arrivals) > 1 and arrivals[1][1] <= start:
                arrivals.popleft()

    def _forget_before(self, versions: Sequence[int]) -> None:
        for posted, version in zip(self.posted, versions, strict=True):
            for older in [iteration for iteration in posted if iteration < version]:
                del posted[older]


class MemoryAverager:
    """One replica's side of `SharedAverages`, with the methods of `GroupAverager`."""

    def __init__(self, shared: SharedAverages, replica: int):
        self.shared, self.replica = shared, replica
        self.traffic = Traffic()
        self.is_running = False

    def start(self, iteration: int, newest: int, message: Payloads) -> None:
        """Begin at `iteration`. `message` is this replica's newest message, from `newest`, the previous iteration."""
        assert newest == iteration - 1, (newest, iteration)
        self.is_running = True
        self.shared.start(self.replica, iteration, message)

    def publish(self, iteration: int, message: Payloads) -> None:
        """Publish this replica's message for `iteration`."""
        if not self.shared.is_global(iteration):
            size = len(self.shared.groups_at(iteration)[0])
            self.traffic.bytes += sum(sent_bytes(part, size, self.shared.wire) for part in message)
        self.shared.publish(self.replica, iteration, message)

    def collect(self, iteration: int) -> tuple[Payloads, int]:
        """Return (sum over the group, iteration of the message that this replica contributed)."""
        return self.shared.collect(self.replica, iteration)

    def latest(self) -> tuple[int, Payloads]:
        """Return the iteration of the newest message, and the message."""
        posted = self.shared.posted[self.replica]
        return max(posted), posted[max(posted)]

    def prune(self, iteration: int) -> None:
        """Do nothing: no store is used, so there are no keys to delete."""

    def finish(self, iteration: int) -> None:
        """End before `iteration`."""
        self.is_running = False

    def close(self) -> None:
        """End after a failure. `Turns` ends the waits of the other replicas."""
        self.is_running = False


def summed(parts: Sequence[torch.Tensor], wire: WireFormat | None) -> torch.Tensor:
    """Return the sum of flat tensors, added in their order. With a wire format, round as `QuantizedAllReduce` does:
    first each message, then the sum."""
    if wire is None:
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total
    values, size = parts[0].numel(), len(parts)
    messages = parts[0].new_zeros(size, size, wire.padded_chunk(values, size))
    for message, part in zip(messages, parts, strict=True):
        message.view(-1)[:values] = part
    total = torch.stack([wire.decode(wire.encode(message), message.dtype) for message in messages]).sum(0)
    return wire.decode(wire.encode(total), total.dtype).view(-1)[:values]


def sent_bytes(part: torch.Tensor, size: int, wire: WireFormat | None) -> float:
    """Return the bytes that one of `size` replicas sends to sum `part`, as `Comms` counts them."""
    if wire is None:
        return 2 * (size - 1) / size * part.nbytes
    return 2 * (size - 1) * wire.size(wire.padded_chunk(part.numel(), size))
