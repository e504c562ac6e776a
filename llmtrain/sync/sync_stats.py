"""Synchronization statistics of this rank, which metrics reduce and log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import InitVar, asdict, dataclass, fields
from typing import Any

import torch

from llmtrain.parallel.device_time import DeviceTimer
from llmtrain.reshard import Rules, first, mean, mean_over_replicas, resharded, rules_of, sum_over_shards
from llmtrain.trace import span


@dataclass
class SyncStats:
    """Counters since the start of the run, and results of the last round. Sums of squares stay on the device until they
    are read, so that training does not wait for them."""

    device: InitVar[torch.device | None] = None
    """Training device. Exposed seconds and waiting seconds are measured on it, other times by the host's clock."""
    count: int = resharded(0, by=first)
    """Completed rounds: `BlockSync.rounds_done`, for the log."""
    anomalies: int = resharded(0, by=first)
    """Blocks excluded from a mean, counted once per replica."""
    rollbacks: int = resharded(0, by=first)
    """Blocks restored to their anchor because every replica was anomalous."""
    longest_exclusion: int = resharded(0, by=first)
    """Largest number, over replicas and blocks, of consecutive rounds up to the last one in which a block was excluded."""
    late: int = resharded(0, by=mean_over_replicas)
    """Group averages that this replica was late for."""
    seconds: float = resharded(0.0, by=mean)
    """Sum over synchronizations of the time from start to end, including the forward passes between their blocks."""
    weights_max: float = resharded(0.0, by=first)
    """Largest weight of one replica in one block in the last round."""
    slowest_replica: int = resharded(0, by=first)
    """Replica that took longest to compute the last round."""
    mean_squared: torch.Tensor | float = resharded(0.0, by=sum_over_shards)
    """Last round (or fragment): this rank's part of ||D||^2, where D is the reduced pseudo-gradient before clipping."""
    spread_squared: torch.Tensor | float = resharded(0.0, by=sum_over_shards)
    """Last round: this rank's part of ||D_n - mean||^2, the squared distance of its replica from the mean."""

    def __post_init__(self, device: torch.device | None) -> None:
        self._exposed, self._waiting = DeviceTimer(device), DeviceTimer(device)

    @property
    def exposed_seconds(self) -> float:
        """Return the time for which training has waited for synchronization: waiting, messages and arithmetic."""
        return self._exposed.seconds

    @property
    def wait_seconds(self) -> float:
        """Return the part of `exposed_seconds` spent waiting for the slowest replica to arrive."""
        return self._waiting.seconds

    @contextmanager
    def time_exposed(self) -> Iterator[None]:
        """Count the enclosed code as time for which training waits for synchronization."""
        with span("exposed"), self._exposed.measure():
            yield

    @contextmanager
    def time_waiting(self) -> Iterator[None]:
        """Count the enclosed code as waiting for the slowest replica."""
        with span("wait"), self._waiting.measure():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the values by name, as plain numbers."""
        squares = {"mean_squared": float(self.mean_squared), "spread_squared": float(self.spread_squared)}
        # Converting the squares waits for the device, so the times of all earlier sections are known from here on.
        seconds = {"exposed_seconds": self.exposed_seconds, "wait_seconds": self.wait_seconds}
        return asdict(self) | squares | seconds

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the values that `state_dict` returned."""
        for entry in fields(self):
            setattr(self, entry.name, state[entry.name])
        self._exposed.load(state["exposed_seconds"])
        self._waiting.load(state["wait_seconds"])


SYNC_STATS_RULES: Rules = {**rules_of(SyncStats), "exposed_seconds": mean, "wait_seconds": mean}
"""Resharding rules for `SyncStats.state_dict`."""
