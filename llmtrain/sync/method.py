"""A method of synchronization: a period, a schedule and perhaps a pull, behind the few calls the trainer makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmtrain.parallel.engine import Engine
from llmtrain.sync.period import Period
from llmtrain.sync.pull import Pull
from llmtrain.sync.schedules.base import BlockTensors, Schedule
from llmtrain.sync.sync_stats import SyncStats


@dataclass(frozen=True)
class StepPlan:
    """What a replica does in one step."""

    lr: float
    """The inner learning rate."""
    computes_gradient: bool = True
    """False: the method has moved the parameters itself, and that is the step."""
    takes_batch: bool = True
    """Whether the step uses up a batch."""


class Method:
    """How replicas agree. The trainer calls `begin_step`, runs what it says, calls `end_step`; and `finish` at the end."""

    def __init__(self, engine: Engine, period: Period, schedule: Schedule, pull: Pull | None):
        self.engine, self.period, self.schedule, self.pull = engine, period, schedule, pull
        self.block_sync = schedule.block_sync
        self._lr = 0.0
        engine.register_block_hook(schedule.before_block)

    def begin_step(self, step: int, lr: float) -> StepPlan:
        """Before step `step` (of this replica, from 1), whose scheduled learning rate is `lr`."""
        self._lr = lr
        self.engine.average_gradients = self.period.is_synchronous(step)
        if self.engine.average_gradients:
            return StepPlan(lr)
        self.block_sync.ensure_anchor()
        self.schedule.begin_step()
        if self.pull is None:
            return StepPlan(lr)
        if not self.pull.should_pull(step):
            return StepPlan(self.pull.gradient_lr(lr))
        self.schedule.flush()
        self.pull.pull_to_anchor(lr)
        return StepPlan(lr, computes_gradient=False, takes_batch=self.pull.section.batch == "drop")

    def roll_back(self) -> None:
        """The parameters become those of the last synchronization; in a synchronous phase they stay."""
        if not self.engine.average_gradients:
            self.block_sync.reset_to_anchor()

    def end_step(self, step: int) -> None:
        """After the optimizer step, or the pull, of step `step`."""
        if not self.engine.average_gradients:
            self.schedule.end_step(step, self._lr, self.period.ends_round(step))

    def agreed_step(self, step: int) -> int | None:
        """After this replica's step `step`: at which step the whole run is, if all ranks know that now; None if only this
        replica knows where it is. All ranks get a number at the same moments, and the same one."""
        return self.period.global_step(step)

    def finish(self) -> None:
        """Carry out what is under way, or a last, shorter round: after it all replicas are equal."""
        self.schedule.finish()

    def close(self) -> None:
        """End what runs in the background; also after a failure."""
        self.schedule.close()

    @property
    def is_synchronized(self) -> bool:
        """All replicas hold the same parameters, and nothing is under way."""
        return self.schedule.is_synchronized

    def report(self) -> SyncStats:
        """Counters so far."""
        return self.block_sync.report

    def fingerprint(self) -> int:
        """Of what all replicas should hold alike, for this rank's shard: see `Anchors.fingerprint`; 0 without anchors."""
        anchors = self.block_sync.anchors
        return anchors.fingerprint() if anchors is not None else 0

    def shared_state(self) -> dict[str, BlockTensors]:
        """State that all replicas have alike, by block; lists are empty where the method keeps none."""
        anchors = self.block_sync.anchors
        return {
            **(anchors.state_dict() if anchors else {"anchor": [], "momentum": []}),
            **self.schedule.shared_state(),
        }

    def per_replica_state(self) -> dict[str, BlockTensors]:
        """State that each replica has for itself, by block."""
        return {"error": self.block_sync.errors, **self.schedule.per_replica_state()}

    def state_dict(self) -> dict[str, Any]:
        """The rest of what a resumed run needs, as plain values."""
        return {
            "report": self.block_sync.report.state_dict(),
            "period": self.period.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, BlockTensors]) -> None:
        """The inverse of `state_dict`, between steps; `tensors` are the shared and own ones by name."""
        if self.block_sync.anchors is not None:
            self.block_sync.anchors.load_state_dict(tensors)
        self.block_sync.errors = [
            error.to(block.shards[0].device, copy=True)
            for error, block in zip(tensors["error"], self.engine.blocks, strict=False)
        ]
        self.block_sync.report.load_state_dict(state["report"])
        self.period.load_state_dict(state["period"])
        self.schedule.load_state_dict(state["schedule"], tensors)

    def resharded(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What `state_dict` would hold, but for the report, on each replica of this run, which others with these `states`
        began (one of each replica)."""
        return {
            "period": self.period.resharded([state["period"] for state in states]),
            "schedule": self.schedule.resharded([state["schedule"] for state in states]),
        }
