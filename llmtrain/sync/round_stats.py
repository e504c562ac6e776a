"""Statistics of the local steps since a synchronization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass


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
