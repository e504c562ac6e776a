"""Synchronization statistics of this rank, which metrics reduce and log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from llmtrain.reshard import first, mean, mean_over_replicas, resharded, sum_over_shards
from llmtrain.trace import span


@dataclass
class SyncStats:
    """Counters since the start of the run, and results of the last round. Seconds are measured on the main
    thread. Sums of squares stay on the device until read, so that training does not wait for them."""

    count: int = resharded(0, by=first)
    """Completed rounds."""
    anomalies: int = resharded(0, by=first)
    """Blocks excluded from a mean, counted once per replica."""
    rollbacks: int = resharded(0, by=first)
    """Blocks restored to their anchor because every replica was anomalous."""
    longest_exclusion: int = resharded(0, by=first)
    """Rounds in a row, up to the last one, in which a block of a replica was excluded; the largest number."""
    late: int = resharded(0, by=mean_over_replicas)
    """Group averages that this replica was late for."""
    seconds: float = resharded(0.0, by=mean)
    """Time from the start to the end of each synchronization, summed, including forward passes in between."""
    exposed_seconds: float = resharded(0.0, by=mean)
    """Time in which training stood still for synchronization: waiting, messages and arithmetic."""
    wait_seconds: float = resharded(0.0, by=mean)
    """Part of `exposed_seconds` spent waiting for the slowest replica to arrive."""
    weights_max: float = resharded(0.0, by=first)
    """Largest weight of one replica in one block in the last round."""
    slowest_replica: int = resharded(0, by=first)
    """Replica that computed longest in the last round."""
    mean_squared: torch.Tensor | float = resharded(0.0, by=sum_over_shards)
    """Last round (or fragment): this rank's part of ||D||^2, where D is the reduced pseudo-gradient before clipping."""
    spread_squared: torch.Tensor | float = resharded(0.0, by=sum_over_shards)
    """Last round: this rank's part of ||D_n - mean||^2, the squared distance of its replica from the mean."""

    @contextmanager
    def time_exposed(self) -> Iterator[None]:
        """Count the enclosed code as time in which training stands still for synchronization."""
        started = time.monotonic()
        with span("exposed"):
            yield
        self.exposed_seconds += time.monotonic() - started

    @contextmanager
    def time_waiting(self) -> Iterator[None]:
        """Count the enclosed code as waiting for the slowest replica."""
        started = time.monotonic()
        with span("wait"):
            yield
        self.wait_seconds += time.monotonic() - started

    def state_dict(self) -> dict[str, Any]:
        """Return the values by name, as plain numbers."""
        return asdict(self) | {"mean_squared": float(self.mean_squared), "spread_squared": float(self.spread_squared)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the values that `state_dict` returned."""
        for entry in fields(self):
            setattr(self, entry.name, state[entry.name])


@dataclass(frozen=True)
class RoundStats:
    """Number and learning rates of the local steps in a round. Equal on all replicas, or a mean over them."""

    steps: float = 0
    last_lr: float = 0.0
    """Learning rate of the last step that had one other than 0."""
    lr_sum: float = 0.0

    def add_step(self, lr: float) -> RoundStats:
        """Return the statistics with one more step."""
        return RoundStats(self.steps + 1, lr or self.last_lr, self.lr_sum + lr)

    def scale(self, normalize: str) -> float:
        """Return the unit of pseudo-gradients: 1 ("none"), or a learning rate ("lr", "lr_sum") unless that is 0."""
        return {"none": 1.0, "lr": self.last_lr, "lr_sum": self.lr_sum}[normalize] or 1.0

    def state(self) -> dict[str, float]:
        """Return plain values by name; `RoundStats(**state)` is the inverse."""
        return asdict(self)


def average_stats(rounds: Sequence[RoundStats]) -> RoundStats:
    """Return the mean of several replicas' rounds. If all are equal, the result is bit-identical to them."""
    first, *others = rounds
    if all(other == first for other in others):
        return first
    columns = zip(*(done.state().values() for done in rounds), strict=True)
    return RoundStats(*(sum(column) / len(rounds) for column in columns))
