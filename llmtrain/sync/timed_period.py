"""Rounds of seconds (A-EDiT, arXiv 2412.07210): no replica waits long, because fast ones take more local steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from llmtrain.config import EverySecondsSection
from llmtrain.parallel.comms import Comms
from llmtrain.reshard import require_equal
from llmtrain.sync.period import Period

Clock = Callable[[], float]
"""A monotonic clock, in seconds."""


class TimedPeriod(Period):
    """A period of `warmup` synchronous steps, then rounds of `section.every` seconds on each replica's own clock.

    A replica's first shard rank reads the clock for all its ranks. A replica whose time is up waits for the others,
    which are at most one step behind. Then all replicas exchange their step counts. The next exchange comes earlier
    if, at this pace, the run would complete its steps before it.
    """

    def __init__(
        self,
        section: EverySecondsSection,
        warmup: int,
        total_steps: int,
        replica_comms: Comms,
        shard_comms: Comms,
        clock: Clock,
    ):
        self.section, self.warmup, self.total_steps = section, warmup, total_steps
        self.replica_comms, self.shard_comms, self.clock = replica_comms, shard_comms, clock
        self._round_started: float | None = None  # when this round began, on this rank's clock
        self._length = section.every
        self._last_exchange_step = 0  # this replica's step at the last exchange
        self._summed_steps = 0  # sum over replicas at the last exchange
        self._summed_steps_at_sync = 0  # the same at the last synchronization
        self._last_length = 0

    def is_synchronous(self, step: int) -> bool:
        if step > self.warmup and self._round_started is None:
            self._round_started = self.clock()
            self._last_exchange_step = step - 1
            self._summed_steps = self._summed_steps_at_sync = self.replica_comms.size * (step - 1)
        return step <= self.warmup

    def ends_round(self, step: int) -> bool:
        if step <= self.warmup:
            return False
        elapsed = self._elapsed()
        return elapsed >= self._length and self._exchange_progress(step, elapsed)

    def round_length(self, step: int) -> int:
        return self._last_length if step > self.warmup else 0

    def step_in_round(self, step: int) -> int:
        return step - self._last_exchange_step if step > self.warmup else 0

    def global_step(self, step: int) -> int | None:
        if step <= self.warmup:
            return step
        return self._summed_steps // self.replica_comms.size if self._last_exchange_step == step else None

    def state_dict(self) -> dict[str, Any]:
        since = self.clock() - self._round_started if self._round_started is not None else None
        counted = {name: getattr(self, f"_{name}") for name in STATE_FIELDS}
        return {"elapsed": since, **counted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._round_started = self.clock() - state["elapsed"] if state["elapsed"] is not None else None
        for name in STATE_FIELDS:
            setattr(self, f"_{name}", state[name])

    def resharded(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return each replica's state for a run that resumes with a different number of replicas. Each starts at the
        old replicas' mean step, rounded down. The sum of all replicas' steps since the last synchronization is kept."""
        first = states[0]
        if first["elapsed"] is None:
            return require_equal(states)
        step = first["summed_steps"] // len(states)
        there, since = self.replica_comms.size * step, first["summed_steps"] - first["summed_steps_at_sync"]
        return first | {
            "elapsed": max(state["elapsed"] for state in states),
            "last_exchange_step": step,
            "summed_steps": there,
            "summed_steps_at_sync": there - since,
            "last_length": round(sum(state["last_length"] for state in states) / len(states)),
        }

    def _elapsed(self) -> float:
        mine = torch.tensor(self.clock() - self._round_started, dtype=torch.float64, device=self.shard_comms.device)
        return float(self.shard_comms.all_gather(mine, "reading the replica's clock")[0])

    def _exchange_progress(self, step: int, elapsed: float) -> bool:
        """Exchange step counts and set the next round's length. Return whether the replicas have taken enough steps
        to synchronize. Waits for all replicas."""
        mine = torch.tensor([step, elapsed], dtype=torch.float64, device=self.replica_comms.device)
        steps, seconds = self.replica_comms.all_gather(mine, "meeting the other replicas").cpu().unbind(1)
        total = int(steps.sum())
        done, left = total - self._summed_steps, self.replica_comms.size * self.total_steps - total
        self._last_length, self._last_exchange_step, self._summed_steps = step - self._last_exchange_step, step, total
        self._length = min(self.section.every, float(seconds.max()) * max(0, left) / done)
        self._round_started = self.clock()
        if total - self._summed_steps_at_sync < self.section.min_steps:
            return False
        self._summed_steps_at_sync = total
        return True


STATE_FIELDS = ("length", "last_exchange_step", "summed_steps", "summed_steps_at_sync", "last_length")
"""State that a resumed run needs in addition to the elapsed time."""
