"""Wait-avoiding schedule of WAGMA (arXiv 2005.00124): group averages that do not wait for slow replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llmtrain.config import WaitAvoidingSection
from llmtrain.errors import RecipeError
from llmtrain.parallel.comms import Comms, make_replica_groups, shard_group
from llmtrain.parallel.in_process import MemoryComms
from llmtrain.sync.anchors import BlockTensors
from llmtrain.sync.local_steps import LocalSteps
from llmtrain.sync.schedules import butterfly
from llmtrain.sync.schedules.base import Schedule, ScheduleParts
from llmtrain.sync.schedules.group_averager import GroupAverager, Payloads, WakeSignal
from llmtrain.sync.schedules.memory_averager import MemoryAverager, SharedAverages


class WaitAvoidingSchedule(Schedule):
    """Wait-avoiding synchronization by group averages. Messages are pseudo-gradients D = anchor - theta, where the
    anchor is the last average over all replicas.

    After a step, a replica takes its group's sum. It continues from anchor - sum / S if its own D is in the sum. It
    continues from anchor - (sum + D) / (S + 1) if it was late and an older D is in the sum. At a round's end all
    replicas synchronize.
    """

    def __init__(self, section: WaitAvoidingSection, parts: ScheduleParts):
        super().__init__(section, parts)
        replicas = self.block_sync.replica_comms.size
        self.size = section.resolve_group_size(replicas) if replicas > 1 else 1
        """S, the number of replicas in a group."""
        self.averager = _averager(self.size, parts) if replicas > 1 else None
        """Averager that takes part for this replica if it is late; None for a single replica."""
        self._round = LocalSteps()
        self._iteration = 0  # local steps so far, which number the group averages
        self._resumed: tuple[int, Payloads] | None = None
        self._counted_bytes = 0.0

    def begin_step(self) -> None:
        """Start the thread before the first local step, so that other replicas need not wait until this step ends.

        The thread starts with the newest message of the checkpoint or, without one, with the current pseudo-gradient. This
        pseudo-gradient is zero, unless the round was begun by a single replica, which has no thread and stores no message.
        """
        if self.averager is not None and not self.averager.is_running:
            newest, message = self._resumed or (self._iteration - 1, self._message())
            self.averager.start(self._iteration, newest, message)
            self._resumed = None

    def end_step(self, step: int, lr: float, ends_round: bool, tokens: float = 0) -> None:
        self._round = self._round.add_step(lr)
        with self.block_sync.stats.time_exposed():
            if ends_round:
                self._average_all()
                self._publish_zeros()
            elif self.averager is not None:
                self._average_group()
        self._iteration += 1

    def finish(self) -> None:
        with self.block_sync.stats.time_exposed():
            if self._round.steps > 0:
                self._average_all()
            self.end_threads()

    def end_threads(self) -> None:
        if self.averager is not None:
            self.averager.finish(self._iteration)

    def close(self) -> None:
        if self.averager is not None:
            self.averager.close()

    @property
    def is_synchronized(self) -> bool:
        return self._round.steps == 0

    def per_replica_state(self) -> dict[str, BlockTensors]:
        """Return the newest message, which the thread of a late replica contributes again. It stays in CPU memory."""
        newest = self._newest()
        return {"posted": list(newest[1]) if newest is not None else []}

    def state_dict(self) -> dict[str, Any]:
        newest = self._newest()
        version = newest[0] if newest is not None else None
        return {"round": self._round.state(), "iteration": self._iteration, "newest": version}

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, BlockTensors]) -> None:
        if self.averager is not None and self.averager.is_running:
            raise RecipeError(
                "a state of wait-avoiding groups can be loaded before the first step only; create LocalUpdates anew"
            )
        self._round, self._iteration = LocalSteps(**state["round"]), state["iteration"]
        if state["newest"] is not None and self.averager is not None:
            self._resumed = state["newest"], [part.cpu().clone() for part in tensors["posted"]]

    def _average_group(self) -> None:
        block_sync, iteration = self.block_sync, self._iteration
        own = self._message()
        with block_sync.stats.time_waiting():
            self.averager.publish(iteration, own)
            sums, version = self.averager.collect(iteration)
        is_late = version != iteration
        block_sync.stats.late += is_late
        self.staleness = iteration - version
        for index in block_sync.anchors.iter_prefetched(block_sync.blocks):
            total, mine = sums[index], own[index]
            # In place, in pinned memory if there is a GPU, so that the host need not wait for the copy.
            mean = total.add_(mine).div_(self.size + 1) if is_late else total.div_(self.size)
            anchor = block_sync.anchors.load_anchor(index)
            block_sync.write_parameters(index, anchor - mean.to(anchor.device, non_blocking=True))
        self._count_bytes()

    def _average_all(self) -> None:
        block_sync = self.block_sync
        block_sync.sync_blocks(block_sync.blocks, self._round)
        block_sync.complete_round()
        self._round = LocalSteps()

    def _publish_zeros(self) -> None:
        """Publish zeros, the pseudo-gradient at the new anchor, so that no message relative to an older anchor is
        contributed."""
        if self.averager is None:
            return
        zeros = [torch.zeros_like(anchor, device="cpu") for anchor in self.block_sync.anchors.anchor]
        self.averager.publish(self._iteration, zeros)
        if self.block_sync.replica_comms.rank == 0 and self.block_sync.shard_comms.rank == 0:
            # All replicas have arrived here, so all of them have run every earlier iteration.
            self.averager.prune(self._iteration)

    def _newest(self) -> tuple[int, Payloads] | None:
        """Return the newest message and its iteration: the thread's or, before the thread starts, one from a
        checkpoint."""
        running = self.averager is not None and self.averager.is_running
        return self.averager.latest() if running else self._resumed

    def _message(self) -> Payloads:
        """Return the pseudo-gradients on the CPU. From a GPU, they are copied to pinned memory, which torch reuses once
        no thread holds the message and no copy from it is in flight. The host waits once for all blocks."""
        visited = self.block_sync.anchors.iter_prefetched(self.block_sync.blocks)
        message = [self.block_sync.payload(index).to("cpu", non_blocking=True) for index in visited]
        self.block_sync.wait_for_device()
        return message

    def _count_bytes(self) -> None:
        sent = self.averager.traffic.bytes  # only the thread adds to it
        self.block_sync.replica_comms.traffic.bytes += sent - self._counted_bytes
        self._counted_bytes = sent


def _averager(size: int, parts: ScheduleParts) -> GroupAverager | MemoryAverager:
    """Return the averager that takes part in groups of `size` when this replica is late: a thread with process groups
    or, if all replicas are in one process, this replica's side of an object that they share."""
    replica = parts.block_sync.replica_comms
    last_length = parts.period.round_length(parts.total_steps + 1)  # of the rounds beyond `total_steps`

    def groups_at(iteration: int) -> list[list[int]]:
        return butterfly.groups_at(iteration, size, replica.size)

    def is_global(iteration: int) -> bool:
        # A user's own loop may continue beyond `total_steps`. With rounds of one step, all iterations would be global, and
        # `GroupAverager.finish` would search forever for one that is not, so none is global beyond `total_steps`.
        step = parts.period.warmup + 1 + iteration
        return (step <= parts.total_steps or last_length > 1) and parts.period.ends_round(step)

    average = _memory_averager if isinstance(replica, MemoryComms) else _threaded_averager
    return average(parts, groups_at, is_global)


def _memory_averager(
    parts: ScheduleParts, groups_at: Callable[[int], list[list[int]]], is_global: Callable[[int], bool]
) -> MemoryAverager:
    """Return this replica's averager in a process of several replicas, all of which share one `SharedAverages`."""
    replica = parts.block_sync.replica_comms

    def seconds_of(number: int, iteration: int) -> float:
        # The warm-up is read here, because a checkpoint that is loaded later may change it.
        return replica.clock.seconds_of(number, parts.period.warmup + 1 + iteration)

    own = SharedAverages(replica.turns, groups_at, is_global, seconds_of, parts.block_sync.wire)
    return MemoryAverager(replica.broadcast_object(own, "sharing the group averages"), replica.rank)


def _threaded_averager(
    parts: ScheduleParts, groups_at: Callable[[int], list[list[int]]], is_global: Callable[[int], bool]
) -> GroupAverager:
    """Return this rank's averager with its process groups. A collective of all ranks."""
    block_sync, timeout = parts.block_sync, parts.timeout_seconds
    replica, shard = block_sync.replica_comms, block_sync.shard_comms
    assert parts.store is not None, "waking the others needs the job's store"
    comms: dict[str, Comms] = {}
    for iteration in range(replica.size.bit_length()):  # covers all groups, which repeat after log2 P iterations
        if str(groups := groups_at(iteration)) not in comms:
            comms[str(groups)] = make_replica_groups(replica, shard, groups, timeout)
    averager = GroupAverager(
        group_of=lambda iteration: comms[str(groups_at(iteration))],
        is_global=is_global,
        shard_comms=shard_group(replica, shard, timeout),
        wake_signal=WakeSignal(parts.store),
        wire=block_sync.wire,
        timeout_seconds=timeout,
    )
    for group in comms.values():
        group.traffic = averager.traffic
    return averager
