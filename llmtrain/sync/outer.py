"""Outer optimizers: the step from a block's reduced pseudo-gradient D to its next anchor."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from llmtrain.config import AnyOuter, MomentumSection, NesterovSection, SgdSection
from llmtrain.sync.round_stats import RoundStats


class Outer(ABC):
    """An outer optimizer. Its state, if any, is one flat tensor per block, shaped like the anchor."""

    has_momentum = False
    normalize = "none"

    @abstractmethod
    def step(self, anchor: torch.Tensor, mean: torch.Tensor, momentum: torch.Tensor | None, since: RoundStats) -> None:
        """Update `anchor` (and `momentum`) in place. `mean` is D; `since` describes the local steps that led to it."""


class Sgd(Outer):
    """SGD: anchor <- anchor - lr D. Averaging is lr = 1."""

    def __init__(self, lr: float):
        self.lr = lr

    def step(self, anchor: torch.Tensor, mean: torch.Tensor, momentum: torch.Tensor | None, since: RoundStats) -> None:
        anchor.add_(mean, alpha=-self.lr)


class Nesterov(Outer):
    """Nesterov momentum: b <- mu b + D / g; anchor <- anchor - lr (D + mu g b). g is 1 or, if normalized, the
    round's last learning rate or the sum of its learning rates. The first displacement is (1 + mu) lr D."""

    has_momentum = True

    def __init__(self, lr: float, momentum: float, normalize: str = "none"):
        self.lr, self.momentum, self.normalize = lr, momentum, normalize

    def step(self, anchor: torch.Tensor, mean: torch.Tensor, momentum: torch.Tensor | None, since: RoundStats) -> None:
        assert momentum is not None
        unit = since.scale(self.normalize)
        momentum.mul_(self.momentum).add_(mean, alpha=1 / unit)
        anchor.add_(mean, alpha=-self.lr).add_(momentum, alpha=-self.lr * self.momentum * unit)


class Momentum(Outer):
    """Heavy-ball momentum: b <- mu b + D / g, with elements clamped to +-clip; anchor <- anchor - lr g b. SlowMo
    (arXiv 1910.00643) has g = the learning rate. CO2 (arXiv 2401.16265) has g = 1 and a clip."""

    has_momentum = True

    def __init__(self, lr: float, momentum: float, clip: float | None, normalize: str):
        self.lr, self.momentum, self.clip, self.normalize = lr, momentum, clip, normalize

    def step(self, anchor: torch.Tensor, mean: torch.Tensor, momentum: torch.Tensor | None, since: RoundStats) -> None:
        assert momentum is not None
        unit = since.scale(self.normalize)
        momentum.mul_(self.momentum).add_(mean, alpha=1 / unit)
        if self.clip is not None:
            momentum.clamp_(-self.clip, self.clip)
        anchor.add_(momentum, alpha=-self.lr * unit)


def build_outer(section: AnyOuter) -> Outer:
    """Return the outer optimizer that a recipe's `sync.outer` describes."""
    if isinstance(section, NesterovSection):
        return Nesterov(section.lr, section.momentum, section.normalize)
    if isinstance(section, MomentumSection):
        return Momentum(section.lr, section.momentum, section.clip, section.normalize)
    return Sgd(section.lr if isinstance(section, SgdSection) else 1.0)
