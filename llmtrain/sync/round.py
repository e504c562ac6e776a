"""The local steps since a synchronisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Round:
    """How many local steps, and at which learning rates. Equal on all replicas, or a mean over them."""

    steps: float = 0
    last_lr: float = 0.0
    """Of the last step whose learning rate was not 0."""
    lr_sum: float = 0.0

    def then(self, lr: float) -> Round:
        """One step more."""
        return Round(self.steps + 1, lr or self.last_lr, self.lr_sum + lr)

    def unit(self, normalise: str) -> float:
        """What pseudo-gradients are measured in: 1, or a learning rate ("lr", "accumulated_lr") unless that is 0."""
        return {"none": 1.0, "lr": self.last_lr, "accumulated_lr": self.lr_sum}[normalise] or 1.0

    def state(self) -> dict[str, float]:
        """Plain values by name; `Round(**state)` is the inverse."""
        return asdict(self)


def mean_round(rounds: Sequence[Round]) -> Round:
    """What several replicas did, as one's; to the last bit what each did, if they did the same."""
    first, *others = rounds
    if all(other == first for other in others):
        return first
    columns = zip(*(done.state().values() for done in rounds), strict=True)
    return Round(*(sum(column) / len(rounds) for column in columns))
