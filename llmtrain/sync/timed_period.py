"""Timed rounds (A-EDiT, arXiv 2412.07210): no replica waits long for a slower one, because fast ones take more steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

    The first rank of a replica reads the clock for all its ranks. A replica whose time is up waits until the others
    have completed their current step. Then all replicas exchange their step counts. If they have taken
    `section.min_steps` steps together, the round ends. Otherwise it continues to the next exchange.

    The next exchange comes earlier than `section.every` if, at the current pace, the run would complete its steps
    before then. Even if the pace changes, no replica takes more than its share of the run's remaining steps before it
    waits for the others. The share is proportional to its steps between the last two exchanges, and rounded up. The run
    therefore ends at most one step per replica beyond `total_steps`. A replica also proceeds to the exchange at once
    when `stop_seen()` is true on its first rank, that is, when this rank knows that a stop was requested.
    """

    def __init__(
        self,
        section: EverySecondsSection,
        warmup: int,
        total_steps: int,
        replica_comms: Comms,
        shard_comms: Comms,
        clock: Clock,
        stop_seen: Callable[[], bool] = lambda: False,
    ):
        super().__init__(section, warmup)
        self.total_steps, self.clock = total_steps, clock
        self.replica_comms, self.shard_comms = replica_comms, shard_comms
        self.stop_seen = stop_seen
        # Time of the last exchange, on this rank's clock, shifted by time that is not training.
        self._exchanged_at: float | None = None
        # Seconds since the last exchange in a loaded state, until the first step: time before it is not training.
        self._resumed_after: float | None = None
        self._paused_at: float | None = None
        self._interval = section.every
        self._last_exchange_step = 0  # this replica's step at the last exchange
        self._summed_steps = 0  # sum of all replicas' steps at the last exchange
        self._summed_steps_at_sync = 0  # the same sum at the last synchronization
        self._last_steps = 0  # this replica's steps between the last two exchanges
        self._step_limit = total_steps  # step of this replica after which the next exchange comes at the latest

    def is_synchronous(self, step: int) -> bool:
        return step <= self.warmup

    def begin_local_step(self, step: int) -> None:
        if self._resumed_after is not None:
            self._exchanged_at, self._resumed_after = self.clock() - self._resumed_after, None
        elif self._exchanged_at is None:
            self._exchanged_at = self.clock()
            self._last_exchange_step = step - 1
            self._summed_steps = self._summed_steps_at_sync = self.replica_comms.size * (step - 1)

    def ends_round(self, step: int) -> bool:
        if step <= self.warmup:
            return False
        elapsed, stop = self._read_clock()
        is_due = elapsed >= self._interval or step >= self._step_limit or stop
        return is_due and self._exchange_progress(step, elapsed, stop)

    def round_length(self, step: int) -> int:
        return self._last_steps if step > self.warmup else 0

    def step_in_round(self, step: int) -> int:
        return step - self._last_exchange_step if step > self.warmup else 0

    def round_number(self, step: int) -> int | None:
        return None if step > self.warmup else 0

    def agreed_step(self, step: int) -> int | None:
        if step <= self.warmup:
            return step
        return self._summed_steps // self.replica_comms.size if self._last_exchange_step == step else None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the enclosed code from the round. Otherwise, after a validation longer than
        `section.every`, a round would have one step."""
        self._paused_at = self.clock()
        yield
        if self._exchanged_at is not None:
            self._exchanged_at += self.clock() - self._paused_at
        self._paused_at = None

    def total_steps_changed(self, is_synchronized: bool) -> None:
        """Schedule the next exchange `section.every` seconds from now, or earlier, as soon as a replica has taken an equal share of
        the remaining steps."""
        if is_synchronized:
            self._summed_steps_at_sync = self._summed_steps
        left = max(0, self.total_steps - self._summed_steps // self.replica_comms.size)
        self._interval, self._step_limit = self.section.every, self._last_exchange_step + left
        if self._exchanged_at is not None:
            self._exchanged_at = self.clock()
        if self._resumed_after is not None:
            self._resumed_after = 0.0

    def state_dict(self) -> dict[str, Any]:
        now = self.clock() if self._paused_at is None else self._paused_at
        since = self._resumed_after if self._exchanged_at is None else now - self._exchanged_at
        counted = {name: getattr(self, f"_{name}") for name in STATE_FIELDS}
        return {"elapsed": since, **counted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._exchanged_at, self._resumed_after = None, state["elapsed"]
        for name in STATE_FIELDS:
            setattr(self, f"_{name}", state[name])

    def resharded(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the state with which every replica resumes if the number of replicas has changed. All start at the old
        replicas' mean step, rounded down. The sum of all replicas' steps since the last synchronization is kept."""
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
            "last_steps": round(sum(state["last_steps"] for state in states) / len(states)),
            "step_limit": self.total_steps,
        }

    def _read_clock(self) -> tuple[float, bool]:
        """Return the seconds since the last exchange and whether a stop was requested, both as the replica's first rank knows
        them. A collective of the shard group."""
        # On the CPU: reading the values from a GPU would wait, in every step, for all work that is queued on it.
        mine = torch.tensor([self.clock() - self._exchanged_at, self.stop_seen()], dtype=torch.float64, device="cpu")
        elapsed, stop = self.shard_comms.all_gather(mine, "reading the replica's clock")[0]
        return float(elapsed), bool(stop)

    def _exchange_progress(self, step: int, elapsed: float, stop: bool) -> bool:
        """Exchange step counts and set the time of the next exchange. Return whether the replicas have taken enough steps
        to synchronize. Waits for all replicas."""
        mine = torch.tensor([step, elapsed, stop], dtype=torch.float64, device=self.replica_comms.device)
        steps, seconds, stops = self.replica_comms.all_gather(mine, "exchanging step counts").cpu().unbind(1)
        self.stop_agreed = bool(stops.any())
        total = int(steps.sum())
        done, left = total - self._summed_steps, self.replica_comms.size * self.total_steps - total
        self._last_steps, self._last_exchange_step, self._summed_steps = step - self._last_exchange_step, step, total
        self._interval = min(self.section.every, float(seconds.max()) * max(0, left) / done)
        self._step_limit = step + math.ceil(max(0, left) * self._last_steps / done)
        self._exchanged_at = self.clock()
        if total - self._summed_steps_at_sync < self.section.min_steps:
            return False
        self._summed_steps_at_sync = total
        return True


STATE_FIELDS = ("interval", "last_exchange_step", "summed_steps", "summed_steps_at_sync", "last_steps", "step_limit")
"""State that a resumed run needs in addition to the elapsed time."""
