"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from pydantic import PositiveFloat, ValidationError

from llmtrain.config import LRScheduleSection, Recipe
from llmtrain.config.section import Count
from llmtrain.errors import RecipeError

RATE_TOLERANCE = 0.01
"""Fraction of the peak by which two learning rates may differ and still count as equal."""


@dataclass(frozen=True)
class LRSchedule:
    """Learning rates of a run: linear warm-up to `peak`, then the schedule's shape.

    All shapes but `constant` and `step` end at `final_ratio * peak` in the last step.
    """

    peak: float
    total_steps: int
    schedule: LRScheduleSection

    @classmethod
    def of(cls, recipe: Recipe) -> LRSchedule:
        """Return the schedule that a recipe describes."""
        return cls(recipe.optim.lr, recipe.train.total_steps, recipe.schedule)

    @classmethod
    def create(cls, *, peak: float, total_steps: int, **shape: Any) -> LRSchedule:
        """Return a schedule built from plain values. `shape` has keys of a recipe's `schedule` section, such as
        `kind="linear"`, `warmup_steps=100` or `final_ratio=0`. Raises RecipeError for a key or value that does not exist."""
        try:
            values = _PlainValues(peak=peak, total_steps=total_steps, **shape)
        except ValidationError as error:
            problem = error.errors()[0]
            raise RecipeError(f"LRSchedule: {problem['loc'][0]} is {problem['input']!r}; {problem['msg']}") from None
        return cls(values.peak, values.total_steps, LRScheduleSection(**shape))

    @property
    def warmup_steps(self) -> int:
        """Number of steps of the linear warm-up; the last one has the peak."""
        return self.schedule.warmup_steps

    @property
    def decay_steps(self) -> int:
        """Number of steps in the decay of `wsd` at the end of the run: at least 1."""
        return max(1, round(self.schedule.decay_fraction * self.total_steps))

    @property
    def last_peak_step(self) -> int:
        """Last step before the decay of `wsd`."""
        return self.total_steps - self.decay_steps

    def first_step_below(self, share: float) -> int:
        """Return the first step after the warm-up whose learning rate is at most `share` of the peak.

        It is `total_steps + 1` if there is none.
        """
        steps = range(self.warmup_steps + 1, self.total_steps + 1)
        # Bisection is possible, because after the warm-up the rates never rise.
        place = bisect_left(steps, True, key=lambda step: self.at(step) <= share * self.peak)
        return steps.start + place

    def at(self, step: int) -> float:
        """Return the learning rate of step `step` (from 1). Beyond `total_steps`, which fast replicas of A-EDiT exceed,
        it stays at the last step's rate."""
        schedule, step = self.schedule, min(step, self.total_steps)
        if step <= schedule.warmup_steps:
            return self.peak * step / schedule.warmup_steps
        if schedule.kind == "constant":
            return self.peak
        if schedule.kind == "step":
            # Without the margin, rounding could turn 0.29 x 100 into 28.99..., and the rate would drop a step early.
            drops = sum(step > share * self.total_steps * (1 + 1e-12) for share in schedule.decay_at)
            return self.peak * schedule.decay_factor**drops
        start = self.last_peak_step if schedule.kind == "wsd" else schedule.warmup_steps
        if step <= start:
            return self.peak
        progress = (step - start) / (self.total_steps - start)
        if schedule.kind == "cosine":
            remaining = 0.5 * (1 + math.cos(math.pi * progress))
        elif schedule.kind == "wsd" and schedule.decay_shape == "1-sqrt":
            remaining = 1 - math.sqrt(progress)
        else:
            remaining = 1 - progress
        return self.peak * (schedule.final_ratio + (1 - schedule.final_ratio) * remaining)

    def has_rate(self, step: int, rate: float) -> bool:
        """Return whether `rate` is the learning rate of step `step`, or lies between the rates of the previous and the
        next step, because some schedulers count from 0 and others from 1."""
        at_0 = 0.0 if self.warmup_steps else self.peak
        nearby = [self.at(step - 1) if step > 1 else at_0, self.at(step), self.at(step + 1)]
        margin = RATE_TOLERANCE * self.peak
        return min(nearby) - margin <= rate <= max(nearby) + margin


class _PlainValues(LRScheduleSection):
    """Keys of `LRSchedule.create`."""

    peak: PositiveFloat
    total_steps: Count
