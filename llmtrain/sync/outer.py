"""How a block's reduced pseudo-gradient D becomes its next anchor."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from llmtrain import config


class Outer(ABC):
    """An outer optimizer; its state, if any, is one flat tensor a block, shaped like the anchor."""

    has_momentum = False

    @abstractmethod
    def step(self, anchor: torch.Tensor, mean: torch.Tensor, momentum: torch.Tensor | None) -> None:
        """Change `anchor` (and `momentum`) in place; `mean` is D."""


class Sgd(Outer):
    """anchor <- anchor - lr D. Averaging is lr = 1."""

    def __init__(self, lr: float):
        self.lr = lr

    def step(self, anchor: torch.Tensor, mean: torch.Tensor, momentum: torch.Tensor | None) -> None:
        anchor.add_(mean, alpha=-self.lr)


class Nesterov(Outer):
    """b <- mu b + D; anchor <- anchor - lr (D + mu b). The first displacement is (1 + mu) lr D."""

    has_momentum = True

    def __init__(self, lr: float, momentum: float):
        self.lr, self.momentum = lr, momentum

    def step(self, anchor: torch.Tensor, mean: torch.Tensor, momentum: torch.Tensor | None) -> None:
        assert momentum is not None
        momentum.mul_(self.momentum).add_(mean)
        anchor.add_(mean, alpha=-self.lr).add_(momentum, alpha=-self.lr * self.momentum)


def build_outer(section: config.AverageOuter | config.SgdOuter | config.NesterovOuter) -> Outer:
    """The outer optimizer a recipe's `sync.outer` describes."""
    if isinstance(section, config.NesterovOuter):
        return Nesterov(section.lr, section.momentum)
    return Sgd(section.lr if isinstance(section, config.SgdOuter) else 1.0)
