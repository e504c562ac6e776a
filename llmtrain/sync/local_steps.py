"""Number, learning rates and tokens of local steps: inputs of schedules, outer optimizers and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class LocalSteps:
    """Number, learning rates and tokens of some local steps, usually those of a round, of this rank or as a mean over replicas."""

    steps: float = 0
    last_lr: float = 0.0
    """Learning rate of the last step whose rate was not 0."""
    lr_sum: float = 0.0
    tokens: float = 0
    """Tokens that this rank has trained on or, in rows that replicas have exchanged, the tokens of all ranks of a replica. 0 unless
    the reduction depends on tokens."""

    def add_step(self, lr: float, tokens: float = 0) -> LocalSteps:
        """Return the statistics with one more step."""
        return LocalSteps(self.steps + 1, lr or self.last_lr, self.lr_sum + lr, self.tokens + tokens)

    def scale(self, normalize: str) -> float:
        """Return the unit g of pseudo-gradients: 1 ("none"), the last learning rate ("lr") or the sum of learning rates
        ("lr_sum"). Without a step, both rates are 0."""
        return {"none": 1.0, "lr": self.last_lr, "lr_sum": self.lr_sum}[normalize]

    def state(self) -> dict[str, float]:
        """Return plain values by name; `LocalSteps(**state)` is the inverse."""
        return asdict(self)


def mean_local_steps(of_replicas: Sequence[LocalSteps]) -> LocalSteps:
    """Return the mean of several replicas' local steps. If all are equal, the result is bit-identical to them."""
    first, *others = of_replicas
    if all(other == first for other in others):
        return first
    names = first.state()
    return LocalSteps(**{name: sum(getattr(one, name) for one in of_replicas) / len(of_replicas) for name in names})


def merge_tokens(states: Sequence[Any], shards: int) -> Any:
    """Return the state of each rank of a replica with a new number of `shards`, given the states of the replica's old ranks.

    The states are nested dicts and lists that are equal except for the numbers named `tokens`. Each of these numbers is replaced by
    an equal part of the old ranks' sum.
    """
    first, *_ = states
    if isinstance(first, dict):
        parts = {name: [state[name] for state in states] for name in first}
        return {name: sum(of) / shards if name == "tokens" else merge_tokens(of, shards) for name, of in parts.items()}
    if isinstance(first, list):
        return [merge_tokens(of_all, shards) for of_all in zip(*states, strict=True)]
    return first
