"""Construction of a method from the choices in a recipe's `sync` section."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from llmtrain.config import (
    AverageSection,
    DelayedSection,
    EverySecondsSection,
    LayerwiseSection,
    OverlappedSection,
    SyncSection,
    WaitAvoidingSection,
)
from llmtrain.lr import LRSchedule
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.groups import make_replica_groups, shard_group
from llmtrain.parallel.wake_signal import WakeSignal
from llmtrain.parallel.wire_format import WireFormat
from llmtrain.sync import butterfly
from llmtrain.sync.anchors import Anchors
from llmtrain.sync.block_sync import BlockSync
from llmtrain.sync.group_averager import GroupAverager
from llmtrain.sync.method import Method
from llmtrain.sync.offload import HostOffload, host_offload
from llmtrain.sync.outer import build_outer
from llmtrain.sync.penalty import Penalty
from llmtrain.sync.period import Period, build_period, warmup_of
from llmtrain.sync.pull import Pull
from llmtrain.sync.schedules.base import Schedule
from llmtrain.sync.schedules.blocking import BlockingSchedule
from llmtrain.sync.schedules.delayed import DelayedSchedule
from llmtrain.sync.schedules.layerwise import LayerwiseSchedule
from llmtrain.sync.schedules.overlapped import OverlappedSchedule
from llmtrain.sync.schedules.wait_avoiding import WaitAvoidingSchedule
from llmtrain.sync.timed_period import Clock, TimedPeriod


def build_wire(kind: str, compiled: bool = False) -> WireFormat | None:
    """Return the wire format that messages are rounded to; None for fp32, which is sent unrounded."""
    return None if kind == "fp32" else WireFormat(kind, compiled)


def needs_anchor(sync: SyncSection) -> bool:
    """Return whether replicas keep the parameters of the last synchronization (4 bytes per parameter). Only a plain
    average that replicas wait for and send unrounded needs no anchor."""
    plain = isinstance(sync.outer, AverageSection) and sync.penalty is None and sync.pull is None
    late = isinstance(sync.schedule, OverlappedSection | DelayedSection | WaitAvoidingSection)
    return late or not plain or sync.wire.kind != "fp32"


def build_method(
    sync: SyncSection,
    engine: Engine,
    replica: Comms,
    shard: Comms,
    rates: LRSchedule,
    *,
    seed: int,
    compiled: bool = False,
    store: dist.Store | None = None,
    timeout_seconds: float = 600,
    clock: Clock = time.monotonic,
    wake_signal: Callable[[dist.Store], WakeSignal] = WakeSignal,
    offload_of: Callable[[torch.device], HostOffload | None] = host_offload,
) -> Method:
    """Build a method. A collective of all ranks.

    `replica` and `shard` are the two axes of the mesh (rank = replica x shards + shard). `rates` are the run's
    learning rates. `compiled` rounds messages with compiled code. `store` is the job's key-value store, which the
    wait-avoiding schedule needs. `clock` times rounds of seconds. `wake_signal` makes a wake signal from the store.
    `offload_of` returns the anchor offload for a device, or None.
    """
    outer = build_outer(sync.outer)
    copies = offload_of(engine.blocks[0].shards[0].device) if sync.offload else None
    anchors = Anchors(engine.blocks, outer.has_momentum, copies) if needs_anchor(sync) else None
    wire = build_wire(sync.wire.kind, compiled)
    block_sync = BlockSync(engine, replica, shard, outer, anchors, wire, sync.wire.error_feedback)
    warmup = warmup_of(sync, rates)
    if isinstance(sync.period, EverySecondsSection):
        # Every step asks for the time: by way of a GPU, the host would wait for all that it has to do.
        ranks = shard if shard.device.type == "cpu" else shard_group(replica, shard, timeout_seconds)
        period: Period = TimedPeriod(sync.period, warmup, rates.total_steps, replica, ranks, clock)
    else:
        period = build_period(sync.period, warmup, rates)
    pull = Pull(sync.pull, block_sync, seed) if sync.pull is not None else None
    if isinstance(sync.schedule, WaitAvoidingSection):

        def is_global(iteration: int) -> bool:
            # Beyond the run's end nothing is global: whoever looks for the next group average finds one.
            step = warmup + 1 + iteration
            return step <= rates.total_steps and period.ends_round(step)

        schedule: Schedule = _wait_avoiding(sync, block_sync, is_global, store, wake_signal, timeout_seconds)
    else:
        schedule = _schedule(sync, block_sync, period)
    return Method(engine, period, schedule, pull)


def _schedule(sync: SyncSection, block_sync: BlockSync, period: Period) -> Schedule:
    if isinstance(sync.schedule, OverlappedSection):
        return OverlappedSchedule(block_sync, period, sync.schedule)
    if isinstance(sync.schedule, DelayedSection):
        return DelayedSchedule(block_sync, sync.schedule)
    penalty = Penalty(sync.penalty, block_sync.replica.size, len(block_sync.blocks)) if sync.penalty else None
    if isinstance(sync.schedule, LayerwiseSection):
        return LayerwiseSchedule(block_sync, penalty, sync.schedule.prefetch)
    return BlockingSchedule(block_sync, penalty)


def _wait_avoiding(
    sync: SyncSection,
    block_sync: BlockSync,
    is_global: Callable[[int], bool],
    store: dist.Store | None,
    activation: Callable[[dist.Store], WakeSignal],
    timeout_seconds: float,
) -> WaitAvoidingSchedule:
    """Build the schedule with its thread and process groups; a single replica needs neither. `is_global` returns
    whether an iteration is the last of a round."""
    replica, shard = block_sync.replica, block_sync.shard
    if replica.size == 1:
        return WaitAvoidingSchedule(block_sync, None, 1)
    assert store is not None, "waking the others needs the job's store"
    size = butterfly.group_size(replica.size, sync.group.size)
    patterns = sorted(
        {butterfly.varying_bits(iteration, size, replica.size) for iteration in range(replica.size.bit_length())}
    )
    comms = {
        bits: make_replica_groups(replica, shard, butterfly.partition(bits, replica.size), timeout_seconds)
        for bits in patterns
    }
    worker = GroupAverager(
        group_of=lambda iteration: comms[butterfly.varying_bits(iteration, size, replica.size)],
        is_global=is_global,
        shard=shard_group(replica, shard, timeout_seconds),
        wake_signal=activation(store),
        wire=block_sync.wire,
        timeout_seconds=timeout_seconds,
    )
    for group in comms.values():
        group.traffic = worker.traffic
    return WaitAvoidingSchedule(block_sync, worker, size)
