"""What synchronizing has cost and done so far on this rank; metrics reduce and log it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from llmtrain.trace import span


@dataclass
class SyncStats:
    """Counters since the start of the run, and the last round's findings. Seconds are the main thread's; sums of squares stay on
    the device until somebody asks, so that training does not wait for it."""

    count: int = 0
    """Rounds completed."""
    anomalies: int = 0
    """Blocks of replicas left out of a mean."""
    rollbacks: int = 0
    """Blocks put back to their anchor because every replica was anomalous."""
    late: int = 0
    """Group averages that this replica was late for."""
    seconds: float = 0.0
    """From a round's opening to its close, forward passes in between included."""
    exposed_seconds: float = 0.0
    """Training stood still for synchronization: waiting, messages and arithmetic."""
    wait_seconds: float = 0.0
    """Of these, waiting for the slowest replica to arrive."""
    weights_max: float = 0.0
    """Largest weight that the last round gave one replica in one block."""
    slowest_replica: int = 0
    """The replica that computed longest in the last round."""
    mean_squared: torch.Tensor | float = 0.0
    """Last round: this rank's part of ||D||^2, of the reduced pseudo-gradient before clipping."""
    spread_squared: torch.Tensor | float = 0.0
    """Last round: this rank's part of ||D_n - mean||^2, how far its replica was from the mean."""

    @contextmanager
    def time_exposed(self) -> Iterator[None]:
        """Training stands still for what happens within."""
        started = time.monotonic()
        with span("exposed"):
            yield
        self.exposed_seconds += time.monotonic() - started

    @contextmanager
    def time_waiting(self) -> Iterator[None]:
        """What happens within is waiting for the slowest replica."""
        started = time.monotonic()
        with span("wait"):
            yield
        self.wait_seconds += time.monotonic() - started

    def state_dict(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self) | {"mean_squared": float(self.mean_squared), "spread_squared": float(self.spread_squared)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        for entry in fields(self):
            setattr(self, entry.name, state[entry.name])
