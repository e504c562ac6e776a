"""When replicas synchronise. Steps count from 1; a step that is not synchronous is local."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left

from llmtrain import config
from llmtrain.lr import LearningRates


class Period(ABC):
    """Decides from the step number alone, so that all ranks decide alike."""

    @abstractmethod
    def is_synchronous(self, step: int) -> bool:
        """Gradients of this step are averaged over the replicas."""

    @abstractmethod
    def ends_round(self, step: int) -> bool:
        """This step is the last of a round: replicas synchronise after it."""

    @abstractmethod
    def length(self, step: int) -> int:
        """Local steps in the round that `step` belongs to; 0 in a synchronous phase."""


class EveryStep(Period):
    """Every step synchronous."""

    def is_synchronous(self, step: int) -> bool:
        return True

    def ends_round(self, step: int) -> bool:
        return False

    def length(self, step: int) -> int:
        return 0


class EverySteps(Period):
    """`warmup` synchronous steps, then rounds of `every` local steps."""

    def __init__(self, every: int, warmup: int):
        self.every, self.warmup = every, warmup

    def is_synchronous(self, step: int) -> bool:
        return step <= self.warmup

    def ends_round(self, step: int) -> bool:
        return step > self.warmup and (step - self.warmup) % self.every == 0

    def length(self, step: int) -> int:
        return 0 if self.is_synchronous(step) else self.every


class Qsr(Period):
    """The quadratic synchronisation rule (arXiv 2310.14423): max(base, floor((alpha / lr)^2)) local steps, lr being
    that of the round's first step, or the peak while the learning rate warms up. The last round is cut so that the
    run ends synchronised."""

    def __init__(self, base: int, alpha: float, warmup: int, rates: LearningRates):
        self.warmup, self._ends = warmup, [warmup]
        while self._ends[-1] < rates.total_steps:
            lr = rates.at(max(self._ends[-1] + 1, rates.warmup_steps))
            longest = rates.total_steps - self._ends[-1]
            # The margin keeps (2 x lr / lr)^2 from being 3.99...; a learning rate of 0 never synchronises but at the end.
            length = max(base, math.floor((alpha / lr) ** 2 * (1 + 1e-12))) if lr > 0 else longest
            self._ends.append(self._ends[-1] + min(length, longest))

    def is_synchronous(self, step: int) -> bool:
        return step <= self.warmup

    def ends_round(self, step: int) -> bool:
        return step > self.warmup and self._ends[bisect_left(self._ends, step)] == step

    def length(self, step: int) -> int:
        if self.is_synchronous(step):
            return 0
        index = bisect_left(self._ends, step)
        return self._ends[index] - self._ends[index - 1]


def build_period(section: config.AnyPeriod, warmup_steps: int, rates: LearningRates) -> Period:
    """The period a recipe's `sync.period` and `sync.warmup_steps` describe; some follow the learning rate."""
    if isinstance(section, config.EveryStep):
        return EveryStep()
    if isinstance(section, config.QsrPeriod):
        return Qsr(section.base, section.alpha, warmup_steps, rates)
    return EverySteps(section.every, warmup_steps)
