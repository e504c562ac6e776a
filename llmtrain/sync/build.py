"""From the choices of a recipe's `sync` section to a method."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from llmtrain.config import (
    AverageOuter,
    EverySeconds,
    Layerwise,
    SyncSection,
)
from llmtrain.config import (
    Overlapped as OverlappedSection,
)
from llmtrain.config import (
    Stale as StaleSection,
)
from llmtrain.config import (
    WaitAvoiding as WaitAvoidingSection,
)
from llmtrain.lr import LearningRates
from llmtrain.parallel.activation import Activation
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.groups import replica_groups, shard_group
from llmtrain.parallel.wire import Wire
from llmtrain.sync import butterfly
from llmtrain.sync.anchors import Anchors
from llmtrain.sync.group_worker import GroupWorker
from llmtrain.sync.method import Method
from llmtrain.sync.offload import Copies, offload_copies
from llmtrain.sync.outer import build_outer
from llmtrain.sync.penalty import Penalty
from llmtrain.sync.period import Period, build_period, warmup_of
from llmtrain.sync.pull import Pull
from llmtrain.sync.schedules.meeting import Meeting
from llmtrain.sync.schedules.overlapped import Overlapped
from llmtrain.sync.schedules.schedule import Schedule
from llmtrain.sync.schedules.stale import Stale
from llmtrain.sync.schedules.wait_avoiding import WaitAvoiding
from llmtrain.sync.synchroniser import PREFETCH, Synchroniser
from llmtrain.sync.timed import Clock, Timed


def build_wire(kind: str, compiled: bool = False) -> Wire | None:
    """The format that messages are rounded to; None for none."""
    return None if kind == "fp32" else Wire(kind, compiled)


def needs_anchor(sync: SyncSection) -> bool:
    """Whether replicas keep the parameters of the last synchronisation, 4 bytes a parameter. Only a plain average that
    is waited for and sent unrounded does without."""
    plain = isinstance(sync.outer, AverageOuter) and sync.penalty is None and sync.pull is None
    late = isinstance(sync.schedule, OverlappedSection | StaleSection | WaitAvoidingSection)
    return late or not plain or sync.wire.kind != "fp32"


def build_method(
    sync: SyncSection,
    engine: Engine,
    replica: Comms,
    shard: Comms,
    rates: LearningRates,
    *,
    seed: int,
    compiled: bool = False,
    store: dist.Store | None = None,
    timeout_seconds: float = 600,
    clock: Clock = time.monotonic,
    activation: Callable[[dist.Store], Activation] = Activation,
    copies_of: Callable[[torch.device], Copies | None] = offload_copies,
) -> Method:
    """Put a method together. A collective of all ranks.

    `replica` and `shard` are the two axes of the mesh (rank = replica x shards + shard), `rates` the run's learning
    rates; `compiled` rounds messages with compiled code. `store` is the job's, for schedules that need to be woken;
    `clock` is what rounds of seconds are kept by. `activation` wakes ranks by way of the store; `copies_of` a device
    offloads anchors from it.
    """
    outer = build_outer(sync.outer)
    copies = copies_of(engine.blocks[0].shards[0].device) if sync.offload else None
    anchors = Anchors(engine.blocks, outer.has_momentum, copies) if needs_anchor(sync) else None
    wire = build_wire(sync.wire.kind, compiled)
    synchroniser = Synchroniser(engine, replica, shard, outer, anchors, wire, sync.wire.feedback)
    warmup = warmup_of(sync, rates)
    if isinstance(sync.period, EverySeconds):
        # Every step asks for the time: by way of a GPU, the host would wait for all that it has to do.
        ranks = shard if shard.device.type == "cpu" else shard_group(replica, shard, timeout_seconds)
        period: Period = Timed(sync.period, warmup, rates.total_steps, replica, ranks, clock)
    else:
        period = build_period(sync.period, warmup, rates)
    pull = Pull(sync.pull, synchroniser, seed) if sync.pull is not None else None
    if isinstance(sync.schedule, WaitAvoidingSection):

        def is_global(iteration: int) -> bool:
            # Beyond the run's end nothing is global: whoever looks for the next group average finds one.
            step = warmup + 1 + iteration
            return step <= rates.total_steps and period.ends_round(step)

        schedule: Schedule = _wait_avoiding(sync, synchroniser, is_global, store, activation, timeout_seconds)
    else:
        schedule = _schedule(sync, synchroniser, period)
    return Method(engine, period, schedule, pull)


def _schedule(sync: SyncSection, synchroniser: Synchroniser, period: Period) -> Schedule:
    if isinstance(sync.schedule, OverlappedSection):
        return Overlapped(synchroniser, period, sync.schedule)
    if isinstance(sync.schedule, StaleSection):
        return Stale(synchroniser, sync.schedule)
    penalty = Penalty(sync.penalty, synchroniser.replica.size, len(synchroniser.blocks)) if sync.penalty else None
    in_forward = isinstance(sync.schedule, Layerwise)
    return Meeting(synchroniser, penalty, in_forward, sync.schedule.prefetch if in_forward else PREFETCH)


def _wait_avoiding(
    sync: SyncSection,
    synchroniser: Synchroniser,
    is_global: Callable[[int], bool],
    store: dist.Store | None,
    activation: Callable[[dist.Store], Activation],
    timeout_seconds: float,
) -> WaitAvoiding:
    """With its thread and the groups it works in; a single replica needs neither. `is_global`: this iteration is the last of a round."""
    replica, shard = synchroniser.replica, synchroniser.shard
    if replica.size == 1:
        return WaitAvoiding(synchroniser, None, 1)
    assert store is not None, "waking the others needs the job's store"
    size = butterfly.group_size(replica.size, sync.group.size)
    patterns = sorted({butterfly.bits(iteration, size, replica.size) for iteration in range(replica.size.bit_length())})
    comms = {
        bits: replica_groups(replica, shard, butterfly.groups(bits, replica.size), timeout_seconds) for bits in patterns
    }
    worker = GroupWorker(
        group_of=lambda iteration: comms[butterfly.bits(iteration, size, replica.size)],
        is_global=is_global,
        shard=shard_group(replica, shard, timeout_seconds),
        activation=activation(store),
        wire=synchroniser.wire,
        timeout_seconds=timeout_seconds,
    )
    for group in comms.values():
        group.traffic = worker.traffic
    return WaitAvoiding(synchroniser, worker, size)
