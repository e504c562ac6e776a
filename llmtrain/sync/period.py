"""When replicas synchronise. Steps count from 1; a step that is not synchronous is local."""

from __future__ import annotations

from abc import ABC, abstractmethod

from llmtrain import config


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


def build_period(section: config.EverySteps | config.EveryStep, warmup_steps: int) -> Period:
    """The period a recipe's `sync.period` and `sync.warmup_steps` describe."""
    if isinstance(section, config.EveryStep):
        return EveryStep()
    return EverySteps(section.every, warmup_steps)
