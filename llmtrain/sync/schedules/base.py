"""Interface between a method and its schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from llmtrain.config import SyncScheduleSection
from llmtrain.reshard import require_equal
from llmtrain.sync.anchors import BlockTensors
from llmtrain.sync.block_sync import BlockSync
from llmtrain.sync.period import Period
from llmtrain.sync.reductions.reduction import Reduction


class Schedule(ABC):
    """Order in which the parts of a synchronization are carried out, relative to training.

    The method calls `begin_step` and `end_step` in local steps only. It passes the period's decision on when a round ends to
    `end_step`.
    """

    staleness = 0
    """Number of steps from taking the last applied message to applying its result, for the log."""

    def __init__(self, section: SyncScheduleSection, parts: ScheduleParts):
        """Create the schedule that a recipe's `sync.schedule` describes. A collective of all ranks."""
        self.section, self.block_sync = section, parts.block_sync

    def begin_step(self) -> None:
        """Prepare a local step before its forward."""

    def before_block(self, index: int) -> None:
        """Carry out the work that is due before block `index` is gathered. If the section says `syncs_in_forward`, this is called in
        every training forward, also in synchronous steps; otherwise never."""

    @abstractmethod
    def end_step(self, step: int, lr: float, ends_round: bool, tokens: float = 0) -> None:
        """Complete local step `step`, and start, advance or complete synchronizations that are due. The step had the learning rate
        `lr`, and this rank's gradient covered `tokens` tokens. `ends_round` says that the round ends with this step."""

    def forget_tokens(self) -> None:
        """Count the tokens of the round from 0 again, because a rollback has undone its steps. The steps still count."""

    def flush(self) -> None:
        """Carry out the work that was left to the next forward. Called before the parameters change without a forward."""

    def wait_for_messages(self) -> None:
        """Wait for the messages in flight, without changing the steps at which they are used. A collective of all ranks."""

    @abstractmethod
    def finish(self) -> None:
        """Complete the synchronizations in flight and synchronize the rest. Afterwards, all replicas are equal."""

    def end_threads(self) -> None:
        """End threads after a step that all ranks have completed, and wait for them."""

    def close(self) -> None:
        """Stop threads, without waiting for them. Also called after a failure."""

    @property
    @abstractmethod
    def is_synchronized(self) -> bool:
        """True if all replicas hold the same parameters and nothing is in flight."""

    @property
    def is_armed(self) -> bool:
        """True if the next training forward synchronizes."""
        return False

    def shared_state(self) -> dict[str, BlockTensors]:
        """Return the state, by block, that is equal on all replicas, except for the anchors and the outer optimizer's state."""
        return {}

    def per_replica_state(self) -> dict[str, BlockTensors]:
        """Return state that differs between replicas, by block."""
        return {}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the remaining state as plain values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, BlockTensors]) -> None:
        """Load what `state_dict` returned. `tensors` holds the shared and per-replica state by name."""

    def resharded(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the plain values with which every replica resumes if the number of replicas has changed. `states` has one state per
        old replica."""
        return require_equal(states)


@dataclass(frozen=True)
class ScheduleParts:
    """Parts from which schedules are built. Each schedule takes those that it needs."""

    block_sync: BlockSync
    period: Period
    reduction: Reduction | None
    """Reduction that weights replicas, or None for the plain mean."""
    total_steps: int
    store: dist.Store | None
    """The job's key-value store."""
    timeout_seconds: float
