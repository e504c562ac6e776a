"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from llmtrain.config import ScheduleSection


def learning_rate(step: int, total_steps: int, peak: float, schedule: ScheduleSection) -> float:
    """Learning rate of step `step` (from 1 to `total_steps`): linear warm-up to `peak`, then the schedule's shape
    down to `final_ratio * peak` in the last step."""
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    progress = (step - schedule.warmup_steps) / max(1, total_steps - schedule.warmup_steps)
    remaining = 1 - progress if schedule.kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (schedule.final_ratio + (1 - schedule.final_ratio) * remaining)
