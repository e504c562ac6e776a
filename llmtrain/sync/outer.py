"""Outer optimizers: the step from a block's reduced pseudo-gradient D to its next anchor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy

import torch

from llmtrain.config import OuterLrSection, OuterRoundsSection
from llmtrain.sync.local_steps import LocalSteps


class Outer(ABC):
    """An outer optimizer. Its state consists of any number of flat tensors per block, which have the shape of the anchor and are
    initially 0 (`OuterSection.state`)."""

    normalize = "none"
    """Unit in which pseudo-gradients are added to the momentum; see `LocalSteps.scale`."""
    lr = 1.0
    momentum = 0.0
    rounds: OuterLrSection | None = None
    """Changes of learning rate and momentum over the rounds; None if there are none."""
    starts_at_anchor = True
    """True if replicas continue from the anchor. If False, they continue from the point that `start` returns, but the run validates,
    exports and ends with the anchor."""

    def in_round(self, number: int) -> Outer:
        """Return the optimizer with the learning rate and momentum of round `number`, counted from 0."""
        if self.rounds is None:
            return self
        now, rounds = copy(self), self.rounds
        now.lr *= _warmup_fraction(number, rounds.lr_warmup)
        if rounds.lr_decay:
            passed = min(1.0, max(0, number - rounds.lr_warmup) / rounds.lr_decay)
            now.lr *= 1 - passed * (1 - rounds.lr_final)
        if isinstance(rounds, OuterRoundsSection):
            now.momentum *= _warmup_fraction(number, rounds.momentum_warmup)
        return now

    @abstractmethod
    def step(
        self, anchor: torch.Tensor, mean: torch.Tensor, state: Sequence[torch.Tensor], local_steps: LocalSteps
    ) -> None:
        """Update `anchor` and `state` in place. `mean` is D, and `local_steps` describes the local steps that led to it. The
        step is elementwise, so the tensors may be any part of a block."""

    def start(self, anchor: torch.Tensor, state: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the parameters from which replicas continue after a step. Elementwise, like `step`."""
        return anchor


class Sgd(Outer):
    """SGD: anchor <- anchor - lr D. Averaging is lr = 1."""

    def __init__(self, lr: float, rounds: OuterLrSection | None = None):
        self.lr, self.rounds = lr, rounds

    def step(
        self, anchor: torch.Tensor, mean: torch.Tensor, state: Sequence[torch.Tensor], local_steps: LocalSteps
    ) -> None:
        anchor.add_(mean, alpha=-self.lr)


class Nesterov(Outer):
    """Nesterov momentum: b <- mu b + D / g; anchor <- anchor - lr (D + mu g b). g is 1 or, if normalized, the round's last
    learning rate or the sum of its learning rates. If g is 0, b does not change and anchor <- anchor - lr D. The first step moves the
    anchor by (1 + mu) lr D."""

    def __init__(self, lr: float, momentum: float, normalize: str = "none", rounds: OuterRoundsSection | None = None):
        self.lr, self.momentum, self.normalize, self.rounds = lr, momentum, normalize, rounds

    def step(
        self, anchor: torch.Tensor, mean: torch.Tensor, state: Sequence[torch.Tensor], local_steps: LocalSteps
    ) -> None:
        (momentum,) = state
        anchor.add_(mean, alpha=-self.lr)
        unit = local_steps.scale(self.normalize)
        if unit == 0:  # all local steps had learning rate 0, so b has nothing to add
            return
        _accumulate(momentum, mean, self.momentum, unit)
        anchor.add_(momentum, alpha=-self.lr * self.momentum * unit)


class Momentum(Outer):
    """Heavy-ball momentum: b <- mu b + D / g, with elements clamped to [-clip, clip]; anchor <- anchor - lr g b. In SlowMo
    (arXiv 1910.00643), g is the learning rate. In CO2 (arXiv 2401.16265), g is 1, and there is a clip."""

    def __init__(
        self,
        lr: float,
        momentum: float,
        clip: float | None,
        normalize: str,
        rounds: OuterRoundsSection | None = None,
    ):
        self.lr, self.momentum, self.clip, self.normalize, self.rounds = lr, momentum, clip, normalize, rounds

    def step(
        self, anchor: torch.Tensor, mean: torch.Tensor, state: Sequence[torch.Tensor], local_steps: LocalSteps
    ) -> None:
        (momentum,) = state
        if (unit := local_steps.scale(self.normalize)) == 0:
            # All local steps had learning rate 0, so only lr D remains of the step lr (mu g b + D).
            anchor.add_(mean, alpha=-self.lr)
            return
        _accumulate(momentum, mean, self.momentum, unit)
        if self.clip is not None:
            momentum.clamp_(-self.clip, self.clip)
        anchor.add_(momentum, alpha=-self.lr * unit)


class PrimalAverage(Outer):
    """Generalized primal averaging (arXiv 2512.17131): the anchor x follows a fast point z as a moving average.

    The momentum tensor holds m = z - x. Replicas continue from y = x + (1 - share) m, and their local steps take them to
    theta. An outer step moves z by theta - y, and then x toward z. With D = x - theta, the new z minus the old x is
    b = z + (theta - y) - x = share m - D, so x <- x + (1 - decay) b and m <- decay b.
    """

    starts_at_anchor = False

    def __init__(self, decay: float, share: float):
        self.decay, self.share = decay, share

    def step(
        self, anchor: torch.Tensor, mean: torch.Tensor, state: Sequence[torch.Tensor], local_steps: LocalSteps
    ) -> None:
        (momentum,) = state
        momentum.mul_(self.share).sub_(mean)
        anchor.add_(momentum, alpha=1 - self.decay)
        momentum.mul_(self.decay)

    def start(self, anchor: torch.Tensor, state: Sequence[torch.Tensor]) -> torch.Tensor:
        (momentum,) = state
        return torch.add(anchor, momentum, alpha=1 - self.share)


def _warmup_fraction(number: int, warmup: int) -> float:
    """Return the fraction that a linear warm-up of `warmup` rounds has reached in round `number` (from 0); 1 after it."""
    return min(1.0, (number + 1) / (warmup + 1))


def _accumulate(momentum: torch.Tensor, mean: torch.Tensor, decay: float, unit: float) -> None:
    """Set b <- mu b + D / g, where mu is `decay` and g is `unit`. If g is 1, this takes a single operation."""
    torch.add(mean if unit == 1 else mean / unit, momentum, alpha=decay, out=momentum)
