"""Construction of a method from a recipe's `sync` section, with tables of the classes that implement each choice."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.config import (
    AverageSection,
    BlockingSection,
    DelayedSection,
    EditPenaltySection,
    EverySecondsSection,
    LayerwiseSection,
    MeanSection,
    MedianNormSection,
    MomentumSection,
    NesterovSection,
    OuterSection,
    OverlappedSection,
    PrimalAverageSection,
    RadialSection,
    ReductionSection,
    SgdSection,
    SyncScheduleSection,
    SyncSection,
    TokenWeightedSection,
    WaitAvoidingSection,
    WireSection,
)
from llmtrain.lr import LRSchedule
from llmtrain.parallel.comms import AnyFormat, Comms, shard_group
from llmtrain.parallel.engine import Replica
from llmtrain.parallel.sparse_format import SparseFormat
from llmtrain.parallel.wire_format import WireFormat
from llmtrain.sync.anchors import Anchors
from llmtrain.sync.block_sync import BlockSync
from llmtrain.sync.method import Method
from llmtrain.sync.moments import MomentAverages
from llmtrain.sync.offload import StreamOffload, host_offload
from llmtrain.sync.outer import Momentum, Nesterov, Outer, PrimalAverage, Sgd
from llmtrain.sync.period import Period, build_period, warmup_of
from llmtrain.sync.pull import Pull
from llmtrain.sync.reductions.edit_penalty import EditPenalty
from llmtrain.sync.reductions.reduction import Reduction, ReductionParts
from llmtrain.sync.reductions.weighted_means import MedianNorm, Radial, TokenWeighted
from llmtrain.sync.schedules.base import Schedule, ScheduleParts
from llmtrain.sync.schedules.blocking import BlockingSchedule, LayerwiseSchedule
from llmtrain.sync.schedules.delayed import DelayedSchedule
from llmtrain.sync.schedules.overlapped import OverlappedSchedule
from llmtrain.sync.schedules.wait_avoiding import WaitAvoidingSchedule
from llmtrain.sync.timed_period import Clock, TimedPeriod

OUTERS: dict[type[OuterSection], Callable[[Any], Outer]] = {
    AverageSection: lambda section: Sgd(1.0),
    SgdSection: lambda section: Sgd(section.lr, section.rounds),
    NesterovSection: lambda section: Nesterov(section.lr, section.momentum, section.normalize, section.rounds),
    MomentumSection: lambda section: Momentum(
        section.lr, section.momentum, section.clip, section.normalize, section.rounds
    ),
    PrimalAverageSection: lambda section: PrimalAverage(section.decay, section.share),
}
"""Constructors of outer optimizers, by the class of `sync.outer`."""
REDUCTIONS: dict[type[ReductionSection], Callable[[Any, ReductionParts], Reduction | None]] = {
    MeanSection: lambda section, parts: None,
    TokenWeightedSection: lambda section, parts: TokenWeighted(),
    RadialSection: lambda section, parts: Radial(parts.replicas),
    MedianNormSection: lambda section, parts: MedianNorm(),
    EditPenaltySection: lambda section, parts: EditPenalty(section, **vars(parts)),
}
"""Constructors of reductions, by the class of `sync.reduction`. For the plain mean, the constructor returns None, because the mean
needs no agreement on weights."""
SCHEDULES: dict[type[SyncScheduleSection], Callable[[Any, ScheduleParts], Schedule]] = {
    BlockingSection: BlockingSchedule,
    LayerwiseSection: LayerwiseSchedule,
    OverlappedSection: OverlappedSchedule,
    DelayedSection: DelayedSchedule,
    WaitAvoidingSection: WaitAvoidingSchedule,
}
"""Constructors of schedules, by the class of `sync.schedule`. They take the section and the method's other parts."""


def build_wire(wire: WireSection, compiled: bool = False) -> AnyFormat | None:
    """Return the format in which messages are sent; None for fp32, which sends them unchanged. With `compiled`, messages are encoded
    and decoded by compiled code."""
    if wire.kind == "topk":
        return SparseFormat(wire.keep, wire.values)
    return None if wire.kind == "fp32" else WireFormat(wire.kind, compiled)


def build_method(
    sync: SyncSection,
    replica: Replica,
    replica_comms: Comms,
    shard_comms: Comms,
    lr_schedule: LRSchedule,
    *,
    seed: int,
    compiled: bool = False,
    store: dist.Store | None = None,
    timeout_seconds: float = 600,
    clock: Clock = time.monotonic,
    stop_seen: Callable[[], bool] = lambda: False,
    offload_of: Callable[[torch.device], StreamOffload | None] = host_offload,
) -> Method:
    """Build a method. A collective of all ranks.

    `replica_comms` and `shard_comms` are the two axes of the mesh (rank = replica x shards + shard). `lr_schedule` gives the
    run's learning rates. With `compiled`, messages are rounded by compiled code. `store` is the job's key-value store, which the
    wait-avoiding schedule needs. `clock` measures timed rounds, which also end once `stop_seen()` is true on a rank.
    `offload_of` returns the anchor offload for a device, or None.
    """
    outer = OUTERS[type(sync.outer)](sync.outer)
    offload = offload_of(replica.blocks[0].shards[0].device) if sync.offload else None
    anchors = Anchors(replica.blocks, sync.outer.state, offload) if sync.needs_anchor else None
    wire = build_wire(sync.wire, compiled)
    feedback = sync.wire.feedback_decay if sync.wire.error_feedback else None
    block_sync = BlockSync(replica, replica_comms, shard_comms, outer, anchors, wire, feedback)
    warmup = warmup_of(sync, lr_schedule)
    if isinstance(sync.period, EverySecondsSection):
        # Ranks exchange the time in every step and read it on the host. Over NCCL, this would wait for all queued GPU work.
        on_cpu = shard_comms.device.type == "cpu"
        clock_comms = shard_comms if on_cpu else shard_group(replica_comms, shard_comms, timeout_seconds)
        total_steps = lr_schedule.total_steps
        period: Period = TimedPeriod(sync.period, warmup, total_steps, replica_comms, clock_comms, clock, stop_seen)
    else:
        period = build_period(sync.period, warmup, lr_schedule)
    pull = Pull(sync.pull, block_sync, seed) if sync.pull is not None else None
    is_mixed = sync.schedule.mixes_parameters
    reduction_parts = ReductionParts(replica_comms.size, len(replica.blocks), wire is not None, is_mixed)
    reduction = REDUCTIONS[type(sync.reduction)](sync.reduction, reduction_parts)
    parts = ScheduleParts(block_sync, period, reduction, lr_schedule.total_steps, store, timeout_seconds)
    moments = None
    if sync.moments is not None:
        moments = MomentAverages(sync.moments, replica, replica_comms, shard_comms, block_sync.stats)
    schedule = SCHEDULES[type(sync.schedule)](sync.schedule, parts)
    return Method(replica, period, schedule, pull, moments, sync.reduction.counts_tokens)
