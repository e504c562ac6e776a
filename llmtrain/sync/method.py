"""Synchronization method: a period, a schedule and optional parts, behind a small interface to the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from llmtrain.parallel.engine import Replica
from llmtrain.reshard import MeshChange, Rules, by_replica, require_equal
from llmtrain.sync.anchors import ANCHOR, BlockTensors
from llmtrain.sync.local_steps import merge_tokens
from llmtrain.sync.moments import MomentAverages
from llmtrain.sync.period import Period
from llmtrain.sync.pull import Pull
from llmtrain.sync.schedules.base import Schedule
from llmtrain.sync.sync_stats import SYNC_STATS_RULES, SyncStats


@dataclass(frozen=True)
class StepPlan:
    """The method's plan for one step of a replica, which the trainer follows."""

    lr: float
    """Inner learning rate."""
    phase: Literal["synchronous", "local"] = "local"
    """Kind of step. In a synchronous step, gradients are averaged over the replicas; in a local step, each replica trains alone. The
    period decides, and `Method.begin_step` sets the engine's `average_gradients` accordingly."""
    computes_gradient: bool = True
    """True if the step computes a gradient; False if the method has moved the parameters instead (PALSGD's pull)."""
    takes_batch: bool = True
    """True if the step consumes a batch. A step without a gradient may leave its batch to the next step."""


class Method:
    """A synchronization method. The trainer calls `begin_step`, follows the returned plan and calls `end_step`. It
    calls `finish` at the end of the run."""

    def __init__(
        self,
        replica: Replica,
        period: Period,
        schedule: Schedule,
        pull: Pull | None = None,
        moments: MomentAverages | None = None,
        counts_tokens: bool = False,
    ):
        self.replica, self.period, self.schedule, self.pull, self.moments = replica, period, schedule, pull, moments
        self._counts_tokens = counts_tokens
        self.block_sync = schedule.block_sync
        self._lr, self._phase = 0.0, "synchronous"
        if schedule.section.syncs_in_forward:
            replica.register_block_hook(schedule.before_block)

    def begin_step(self, step: int, lr: float) -> StepPlan:
        """Prepare this replica's step number `step` (from 1), whose scheduled learning rate is `lr`, and return its plan."""
        is_synchronous = self.period.is_synchronous(step)
        self._lr, self._phase = lr, "synchronous" if is_synchronous else "local"
        self.replica.average_gradients = is_synchronous
        if is_synchronous:
            return StepPlan(lr, self._phase)
        self.period.begin_local_step(step)
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
        """Set the parameters to those of the last synchronization. In a synchronous phase, do nothing."""
        if self._phase == "local":
            self.block_sync.reset_to_anchor()
            self.schedule.forget_tokens()

    def end_step(self, step: int, tokens: torch.Tensor | float = 0) -> None:
        """Complete step `step` after its optimizer step or pull, and synchronize if the period and the schedule say so.
        `tokens` is the number of tokens in this rank's gradient, which may be a scalar on the device."""
        if self._phase == "local":
            # Count tokens only for a reduction that uses them. Resharding may require that all replicas have equal statistics,
            # and their tokens may differ.
            tokens = float(tokens) if self._counts_tokens else 0
            ends_round = self.period.ends_round(step)  # in timed rounds, a collective
            self.schedule.end_step(step, self._lr, ends_round, tokens)
            if self.moments is not None and ends_round:
                self.moments.end_round()

    def agreed_step(self, step: int) -> int | None:
        """Return the global step after this replica's step `step`; None between two exchanges of step counts, in timed rounds.
        All ranks get the same sequence of global steps."""
        return self.period.agreed_step(step)

    def wait_for_messages(self) -> None:
        """Wait for the messages in flight, without changing the steps at which they are used."""
        self.schedule.wait_for_messages()

    def finish(self) -> None:
        """Complete the synchronizations in flight and a last, shorter round. Afterwards, all replicas are equal."""
        self.schedule.finish()
        self.block_sync.end_at_anchor()

    def end_threads(self) -> None:
        """End background work and wait for it, after a step that all ranks have completed. If a thread still waited for the job's
        store when the interpreter shuts down, the store's answer, or the loss of the store, would abort the process."""
        self.schedule.end_threads()

    def close(self) -> None:
        """Stop background work without waiting for it. Also called after a failure."""
        self.schedule.close()

    @property
    def is_synchronized(self) -> bool:
        """True if all replicas hold the same parameters and nothing is in flight."""
        return self.schedule.is_synchronized

    def validated_blocks(self) -> Sequence[torch.Tensor] | None:
        """Return the parameters that the run validates and exports, by block; None if the run uses the replicas' mean."""
        anchors = self.block_sync.anchors
        if self.block_sync.outer.starts_at_anchor or anchors is None or not anchors.is_set:
            return None
        return anchors.state_dict()[ANCHOR]

    @property
    def stats(self) -> SyncStats:
        """Counters so far, and results of the last round."""
        return self.block_sync.stats

    def take_warnings(self) -> list[str]:
        """Return the warnings since the last call. All ranks have the same ones."""
        taken, self.block_sync.warnings = self.block_sync.warnings, []
        return taken

    def fingerprint(self) -> torch.Tensor | int:
        """Return the fingerprint of this rank's anchors and outer state (see `Anchors.fingerprint`), which should be equal
        on all replicas; 0 without anchors, or before they are set."""
        anchors = self.block_sync.anchors
        return anchors.fingerprint() if anchors is not None and anchors.is_set else 0

    def shared_state(self) -> dict[str, BlockTensors]:
        """Return the state that is equal on all replicas: lists of tensors by block. A list is empty if the method keeps no such
        state."""
        anchors = self.block_sync.anchors
        return {
            **(anchors.state_dict() if anchors else {ANCHOR: []}),
            **self.schedule.shared_state(),
        }

    def per_replica_state(self) -> dict[str, BlockTensors]:
        """Return state that differs between replicas, by block."""
        return {"error": self.block_sync.rounding_errors, **self.schedule.per_replica_state()}

    def total_steps_changed(self) -> None:
        """Adapt state that has just been loaded to a number of total steps that differs from the checkpoint's."""
        self.period.total_steps_changed(self.is_synchronized)

    def keep_warmup(self, step: int) -> None:
        """Keep the first round after global step `step` if the state that was just loaded, from that step, is still in the
        synchronous warm-up. Once local steps have begun, a run does not return to the warm-up: replicas with different moments would
        not stay equal, even with equal gradients."""
        if self._phase != "local":
            self.period.set_warmup(max(self.period.warmup, step))

    def state_dict(self) -> dict[str, Any]:
        """Return the method's remaining state, as plain values."""
        # Once local steps have begun, store the warm-up: a longer one in a changed recipe would return to synchronous steps.
        begun = {"warmup": self.period.warmup} if self._phase == "local" else {}
        return {
            # Checkpoints store the number of rounds among the statistics.
            "report": {**self.block_sync.stats.state_dict(), "count": self.block_sync.rounds_done},
            "period": {**self.period.state_dict(), **begun},
            "schedule": self.schedule.state_dict(),
            "moments": self.moments.state_dict() if self.moments is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, BlockTensors]) -> None:
        """Load what `state_dict` returned, between steps. `tensors` holds the shared and per-replica state by name."""
        if self.block_sync.anchors is not None:
            self.block_sync.anchors.load_state_dict(tensors)
        self.block_sync.rounding_errors = [
            error.to(block.shards[0].device, copy=True)
            for error, block in zip(tensors["error"], self.replica.blocks, strict=False)
        ]
        self.block_sync.stats.load_state_dict(state["report"])
        self.block_sync.rounds_done = state["report"]["count"]
        self.period.load_state_dict(state["period"])
        if "warmup" in state["period"]:
            self.period.set_warmup(state["period"]["warmup"])
            self._phase = "local"
        self.schedule.load_state_dict(state["schedule"], tensors)
        if self.moments is not None:
            self.moments.load_state_dict(state["moments"])

    def reshard_rules(self) -> Rules:
        """Return the rules by which `state_dict` is resharded."""
        return {
            "report": SYNC_STATS_RULES,
            "period": by_replica(self.period.resharded),
            "schedule": self._reshard_schedule,
            "moments": by_replica(require_equal),
        }

    def _reshard_schedule(self, change: MeshChange, values: list) -> Any:
        """Return the schedule's state on another mesh. The states of a replica's ranks are merged first, and if the number of replicas
        has changed, the states of the old replicas next."""
        starts = range(0, len(values), change.old_shards)
        states = [merge_tokens(values[start : start + change.old_shards], change.shards) for start in starts]
        return self.schedule.resharded(states) if change.replicas_changed else states[0]
