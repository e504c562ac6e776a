"""Periods: when replicas synchronize. Steps count from 1; a step that is not synchronous is local."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from llmtrain.config import AnyPeriod, EveryStepSection, PeriodSection, QsrSection, StepsSection, SyncSection
from llmtrain.lr import LRSchedule
from llmtrain.reshard import require_equal


class Period(ABC):
    """A division of the run into synchronous steps and rounds of local steps.

    All ranks come to the same decisions without communicating, because all replicas take the same number of steps and decisions
    depend on the step number alone. `TimedPeriod` is the exception. A `step` is the replica's own, from 1.
    """

    stop_agreed = False
    """True if all ranks know that a stop was requested, which ended the last round early."""

    def __init__(self, section: PeriodSection, warmup: int = 0):
        """Create a period with `warmup` synchronous steps before the first round."""
        self.section, self.warmup = section, warmup

    @abstractmethod
    def is_synchronous(self, step: int) -> bool:
        """Return whether the gradients of this step are averaged over the replicas."""

    def begin_local_step(self, step: int) -> None:
        """Begin a local step. The first local step begins the first round."""

    @abstractmethod
    def ends_round(self, step: int) -> bool:
        """Return whether this step is the last step of a round, after which replicas synchronize."""

    @abstractmethod
    def round_length(self, step: int) -> int:
        """Return the number of local steps in the round that contains `step`; 0 in a synchronous phase. `TimedPeriod` returns
        this replica's local steps between the last two exchanges."""

    @abstractmethod
    def step_in_round(self, step: int) -> int:
        """Return the position of this local step in its round, from 1; 0 in a synchronous phase."""

    def round_number(self, step: int) -> int | None:
        """Return the number of the round that contains `step`, from 1; 0 in a synchronous phase; None if rounds can only be
        counted when they end."""
        return 0

    def agreed_step(self, step: int) -> int | None:
        """Return the global step after this replica's step `step`; None if not all ranks know it."""
        return step

    def set_warmup(self, steps: int) -> None:
        """Set the number of synchronous steps before the first round, for a run that resumes."""
        self.warmup = steps

    def paused(self) -> AbstractContextManager[None]:
        """Return a context manager for a pause in training, such as a validation. All replicas enter it after the same global step."""
        return nullcontext()

    def total_steps_changed(self, is_synchronized: bool) -> None:
        """Adapt loaded state to a number of total steps that differs from the checkpoint's. `is_synchronized` says that no
        replica has taken a local step since the last synchronization."""

    def state_dict(self) -> dict[str, Any]:
        """Return the period's state, which is empty if decisions depend on the step number alone."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""

    def resharded(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return each replica's state for a run that resumes with a different number of replicas. `states` has one
        state per old replica."""
        return require_equal(states)


class EveryStep(Period):
    """A period in which every step is synchronous."""

    def is_synchronous(self, step: int) -> bool:
        return True

    def ends_round(self, step: int) -> bool:
        return False

    def round_length(self, step: int) -> int:
        return 0

    def step_in_round(self, step: int) -> int:
        return 0


class FixedPeriod(Period):
    """A period with `warmup` synchronous steps, then rounds of `section.every` local steps."""

    def is_synchronous(self, step: int) -> bool:
        return step <= self.warmup

    def ends_round(self, step: int) -> bool:
        return self.step_in_round(step) == self.section.every

    def round_length(self, step: int) -> int:
        return 0 if self.is_synchronous(step) else self.section.every

    def step_in_round(self, step: int) -> int:
        return 0 if self.is_synchronous(step) else (step - self.warmup - 1) % self.section.every + 1

    def round_number(self, step: int) -> int:
        return 0 if self.is_synchronous(step) else (step - self.warmup - 1) // self.section.every + 1


class QsrPeriod(Period):
    """The quadratic synchronization rule (arXiv 2310.14423): rounds of max(base, floor((alpha / lr)^power)) local steps. lr is
    the learning rate of the round's first step, or the peak during the learning rate's warm-up. The last round is shortened so that
    the run ends synchronized. If a user's own loop continues beyond the total steps of the schedule, later rounds have `base`
    steps."""

    def __init__(self, section: QsrSection, warmup: int, lr_schedule: LRSchedule):
        super().__init__(section, warmup)
        self.lr_schedule = lr_schedule
        self.set_warmup(warmup)

    def set_warmup(self, steps: int) -> None:
        section, lr_schedule = self.section, self.lr_schedule
        self.warmup, self._ends = steps, [steps]
        while self._ends[-1] < lr_schedule.total_steps:
            lr = lr_schedule.at(max(self._ends[-1] + 1, lr_schedule.warmup_steps))
            longest = lr_schedule.total_steps - self._ends[-1]
            self._ends.append(self._ends[-1] + min(max(section.base, _grown(section, lr)), longest))

    def is_synchronous(self, step: int) -> bool:
        return step <= self.warmup

    def ends_round(self, step: int) -> bool:
        return step > self.warmup and self.step_in_round(step) == self.round_length(step)

    def round_length(self, step: int) -> int:
        if self.is_synchronous(step):
            return 0
        index = bisect_left(self._ends, step)
        return self._ends[index] - self._ends[index - 1] if index < len(self._ends) else self.section.base

    def step_in_round(self, step: int) -> int:
        if self.is_synchronous(step):
            return 0
        index, beyond = bisect_left(self._ends, step), step - self._ends[-1]
        return step - self._ends[index - 1] if index < len(self._ends) else (beyond - 1) % self.section.base + 1

    def round_number(self, step: int) -> int:
        index, beyond = bisect_left(self._ends, step), step - self._ends[-1]
        return index if index < len(self._ends) else index + (beyond - 1) // self.section.base


def _grown(section: QsrSection, lr: float) -> float:
    """Return floor((alpha / lr)^power), the length of a round that begins at learning rate `lr`, before the minimum `base` applies;
    infinite if `lr` is 0."""
    try:
        # Without the margin, rounding could turn (2 x lr / lr)^2 into 3.99..., whose floor is 3.
        return math.floor((section.alpha / lr) ** section.power * (1 + 1e-12))
    except (OverflowError, ZeroDivisionError):
        return math.inf


def warmup_of(sync: SyncSection, lr_schedule: LRSchedule) -> int:
    """Return the number of synchronous steps before the first local one: `warmup_steps`, or more if the learning
    rate takes longer to fall to `warmup_until_lr` of its peak."""
    if sync.warmup_until_lr is None:
        return sync.warmup_steps
    return max(sync.warmup_steps, lr_schedule.first_step_below(sync.warmup_until_lr) - 1)


PERIODS: dict[type[PeriodSection], Callable[[Any, int, LRSchedule], Period]] = {
    EveryStepSection: lambda section, warmup, lr_schedule: EveryStep(section),
    StepsSection: lambda section, warmup, lr_schedule: FixedPeriod(section, warmup),
    QsrSection: QsrPeriod,
}
"""Constructors of periods of steps, by the class of `sync.period`. They take the section, the number of synchronous steps before
the first round, and the run's learning-rate schedule. `build_method` builds timed periods."""


def build_period(section: AnyPeriod, warmup: int, lr_schedule: LRSchedule) -> Period:
    """Return the period of steps that a recipe's `sync.period` describes."""
    return PERIODS[type(section)](section, warmup, lr_schedule)
