"""The local steps since a synchronization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class RoundStats:
    """How many local steps, and at which learning rates. Equal on all replicas, or a mean over them."""

    steps: float = 0
    last_lr: float = 0.0
    """Of the last step whose learning rate was not 0."""
    lr_sum: float = 0.0

    def add_step(self, lr: float) -> RoundStats:
        """One step more."""
        return RoundStats(self.steps + 1, lr or self.last_lr, self.lr_sum + lr)

    def scale(self, normalize: str) -> float:
        """What pseudo-gradients are measured in: 1, or a learning rate ("lr", "lr_sum") unless that is 0."""
        return {"none": 1.0, "lr": self.last_lr, "lr_sum": self.lr_sum}[normalize] or 1.0

    def state(self) -> dict[str, float]:
        """Plain values by name; `Round(**state)` is the inverse."""
        return asdict(self)


def average_stats(rounds: Sequence[RoundStats]) -> RoundStats:
    """What several replicas did, as one's; to the last bit what each did, if they did the same."""
    first, *others = rounds
    if all(other == first for other in others):
        return first
    columns = zip(*(done.state().values() for done in rounds), strict=True)
    return RoundStats(*(sum(column) / len(rounds) for column in columns))
