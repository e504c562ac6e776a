"""Virtual clock of replicas in one process.

The replicas take turns on one device, so their real speeds mean nothing. Methods whose results depend on which replica
is ahead still need speeds. The recipe gives them, which also makes runs reproducible.
"""

from __future__ import annotations

import math
import random

from llmtrain.config import VirtualClockSection

TICKS = 2**20
"""Ticks per second. Times are rounded up to whole ticks, so that their sums and differences are exact."""


class VirtualClock:
    """Clock of one replica. A training step takes the recipe's seconds, and messages take none. A replica that waits for others
    continues when the last of them has arrived. Calling the clock returns the seconds since this start."""

    def __init__(self, section: VirtualClockSection, seed: int, replica: int):
        """Create the clock of replica `replica`, at 0. `seed` decides which replica is late in which step."""
        self.section, self.seed, self.replica = section, seed, replica
        self.now = 0.0
        """Seconds since the run's first step."""
        self._started_at = 0.0
        self._last_step = 0

    def __call__(self) -> float:
        return self.now - self._started_at

    def restore(self, now: float) -> None:
        """Continue at the time of a checkpoint. The seconds that the clock returns do not jump, because a timed period
        may have loaded its state earlier."""
        self._started_at += now - self.now
        self.now = now

    def seconds_of(self, replica: int, step: int) -> float:
        """Return the duration of step `step` (from 1) of any replica."""
        steps, delay = self.section.step_seconds, self.section.random_delay
        late = random.Random(f"{self.seed}, who is late in step {step}").randrange(len(steps)) if delay else None
        return math.ceil((steps[replica] + (delay if replica == late else 0.0)) * TICKS) / TICKS

    def complete_step(self, step: int) -> None:
        """Let the duration of this replica's step `step` pass, if it has not passed already."""
        if step != self._last_step:
            self._last_step = step
            self.now += self.seconds_of(self.replica, step)

    def wait_until(self, time: float) -> None:
        """Advance to `time`, unless it has passed."""
        self.now = max(self.now, time)
