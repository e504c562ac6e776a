"""Local steps of a round, from which schedules, outer optimizers and reductions compute: part of a method's state, not of its log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class RoundStats:
    """Number, learning rates and tokens of some local steps, mostly those of a round: this rank's, or the replicas' mean."""

    steps: float = 0
    last_lr: float = 0.0
    """Learning rate of the last step that had one other than 0."""
    lr_sum: float = 0.0
    tokens: float = 0
    """Tokens that this rank has trained on, or, in rows that replicas have exchanged, those of a complete replica. 0 unless the
    reduction depends on tokens."""

    def add_step(self, lr: float, tokens: float = 0) -> RoundStats:
        """Return the statistics with one more step."""
        return RoundStats(self.steps + 1, lr or self.last_lr, self.lr_sum + lr, self.tokens + tokens)

    def scale(self, normalize: str) -> float:
        """Return the unit g of pseudo-gradients: 1 ("none"), the last learning rate ("lr") or the sum of learning rates
        ("lr_sum"). A learning rate is 0 if there was no step."""
        return {"none": 1.0, "lr": self.last_lr, "lr_sum": self.lr_sum}[normalize]

    def state(self) -> dict[str, float]:
        """Return plain values by name; `RoundStats(**state)` is the inverse."""
        return asdict(self)


def average_stats(rounds: Sequence[RoundStats]) -> RoundStats:
    """Return the mean of several replicas' rounds. If all are equal, the result is bit-identical to them."""
    first, *others = rounds
    if all(other == first for other in others):
        return first
    return RoundStats(**{name: sum(getattr(done, name) for done in rounds) / len(rounds) for name in first.state()})
