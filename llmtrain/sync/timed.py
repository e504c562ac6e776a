"""Rounds of seconds (A-EDiT, arXiv 2412.07210): fast replicas do more local steps than slow ones, nobody waits long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from llmtrain.config import EverySeconds
from llmtrain.parallel.comms import Comms
from llmtrain.sync.alike import alike
from llmtrain.sync.period import Period

Clock = Callable[[], float]
"""Seconds since some moment, never going back."""


class Timed(Period):
    """`warmup` synchronous steps, then rounds that last `section.every` seconds on each replica's own clock.

    A replica's first shard rank reads the clock for all its ranks. A replica whose time is up meets the others, who
    are at most one step behind; there everybody learns how many steps all have done. The next meeting comes earlier
    if at this pace the run's steps would be done before it.
    """

    def __init__(
        self, section: EverySeconds, warmup: int, total_steps: int, replica: Comms, shard: Comms, clock: Clock
    ):
        self.section, self.warmup, self.total_steps = section, warmup, total_steps
        self.replica, self.shard, self.clock = replica, shard, clock
        self._since: float | None = None  # when this round began, on this rank's clock
        self._length = section.every
        self._met_at = 0  # this replica's step at the last meeting
        self._steps_there = 0  # all replicas' steps then, and at the last synchronisation
        self._steps_synchronised = 0
        self._last_length = 0

    def is_synchronous(self, step: int) -> bool:
        if step > self.warmup and self._since is None:
            self._since = self.clock()
            self._met_at = step - 1
            self._steps_there = self._steps_synchronised = self.replica.size * (step - 1)
        return step <= self.warmup

    def ends_round(self, step: int) -> bool:
        if step <= self.warmup:
            return False
        elapsed = self._elapsed()
        return elapsed >= self._length and self._meet(step, elapsed)

    def length(self, step: int) -> int:
        return self._last_length if step > self.warmup else 0

    def place(self, step: int) -> int:
        return step - self._met_at if step > self.warmup else 0

    def agreed(self, step: int) -> int | None:
        if step <= self.warmup:
            return step
        return self._steps_there // self.replica.size if self._met_at == step else None

    def state_dict(self) -> dict[str, Any]:
        since = self.clock() - self._since if self._since is not None else None
        counted = {name: getattr(self, f"_{name}") for name in COUNTED}
        return {"elapsed": since, **counted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._since = self.clock() - state["elapsed"] if state["elapsed"] is not None else None
        for name in COUNTED:
            setattr(self, f"_{name}", state[name])

    def reshaped(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Each replica is where the run is: at its mean step, rounded down. All of them together have done as many steps
        since the last synchronisation as the others had."""
        first = states[0]
        if first["elapsed"] is None:
            return alike(states)
        step = first["steps_there"] // len(states)
        there, since = self.replica.size * step, first["steps_there"] - first["steps_synchronised"]
        return first | {
            "elapsed": max(state["elapsed"] for state in states),
            "met_at": step,
            "steps_there": there,
            "steps_synchronised": there - since,
            "last_length": round(sum(state["last_length"] for state in states) / len(states)),
        }

    def _elapsed(self) -> float:
        mine = torch.tensor(self.clock() - self._since, dtype=torch.float64, device=self.shard.device)
        return float(self.shard.all_gather(mine, "reading the replica's clock")[0])

    def _meet(self, step: int, elapsed: float) -> bool:
        """Wait for all replicas. Whether they have done enough to synchronise."""
        mine = torch.tensor([step, elapsed], dtype=torch.float64, device=self.replica.device)
        steps, seconds = self.replica.all_gather(mine, "meeting the other replicas").cpu().unbind(1)
        total = int(steps.sum())
        done, left = total - self._steps_there, self.replica.size * self.total_steps - total
        self._last_length, self._met_at, self._steps_there = step - self._met_at, step, total
        self._length = min(self.section.every, float(seconds.max()) * max(0, left) / done)
        self._since = self.clock()
        if total - self._steps_synchronised < self.section.min_steps:
            return False
        self._steps_synchronised = total
        return True


COUNTED = ("length", "met_at", "steps_there", "steps_synchronised", "last_length")
"""What a resumed run has to know beside the time that has passed."""
