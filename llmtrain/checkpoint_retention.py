"""Choice of the checkpoints that a run keeps, and of the best checkpoint: the one with the lowest loss among those
validated at their own step.

This module does not import torch, so that commands that only inspect a run start fast.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.config import CheckpointSection
from llmtrain.run_files import STATE_FILE, complete_checkpoints

BEST = "best"
"""Word that stands for the step of the best checkpoint in the `--step` option."""


@dataclass(frozen=True)
class CheckpointLoss:
    """Validation loss of a checkpoint at its step, over `tokens` tokens of the run's own validation text."""

    loss: float
    tokens: int


def loss_of(state: Mapping[str, Any]) -> CheckpointLoss | None:
    """Return the loss in the content of a state.json; None if it has no finite loss that was measured at its own step."""
    try:
        progress = state["ranks"][0]
        found = CheckpointLoss(progress["last_eval"]["loss"], progress["last_eval"]["tokens"])
        is_own = progress["last_evaluated"] == state["step"]
    except (KeyError, IndexError, TypeError):
        return None
    return found if is_own and math.isfinite(found.loss) else None


def stored_loss(checkpoint: Path) -> CheckpointLoss | None:
    """Return the loss of a checkpoint; None also if its state.json is damaged. Raises OSError if the file can't be read."""
    try:
        return loss_of(json.loads((checkpoint / STATE_FILE).read_bytes()))
    except ValueError:
        return None


def read_loss(checkpoint: Path) -> CheckpointLoss | None:
    """Return the loss of a checkpoint; None also if its state.json can't be read."""
    try:
        return stored_loss(checkpoint)
    except OSError:
        return None


def read_losses(directory: Path) -> dict[int, CheckpointLoss | None]:
    """Return the validation losses of all complete checkpoints in a `checkpoints` folder, by step."""
    return {step: read_loss(path) for step, path in complete_checkpoints(directory).items()}


def best_step(losses: Mapping[int, CheckpointLoss | None]) -> int | None:
    """Return the step with the lowest loss, the latest of equal ones; None if no step has a loss.

    Only losses over the same number of tokens as the latest loss count, because `eval.tokens` may have been changed.
    """
    found = {step: loss for step, loss in losses.items() if loss is not None}
    if not found:
        return None
    tokens = found[max(found)].tokens
    return min((loss.loss, -step, step) for step, loss in found.items() if loss.tokens == tokens)[2]


def expired(losses: Mapping[int, CheckpointLoss | None], section: CheckpointSection) -> list[int]:
    """Return the steps of the checkpoints to delete, in ascending order. `losses` maps the step of each existing
    checkpoint to its validation loss."""
    older = sorted(losses)[: -section.keep]
    best = best_step(losses) if section.keep_best else None
    first: dict[int, int] = {}
    if section.keep_every is not None:
        for step in sorted(losses):
            first.setdefault(step // section.keep_every, step)
    kept = {step for multiple, step in first.items() if multiple > 0}
    return [step for step in older if step != best and step not in kept]


def max_on_disk(steps: int, section: CheckpointSection) -> int:
    """Return the largest number of checkpoints that an uninterrupted run of `steps` steps has on disk at a time. This
    is the number to keep plus one, because the oldest is deleted only when the newest is complete, and at most the
    number that the run writes."""
    written = math.ceil(steps / (section.every or steps))
    for_good = steps // section.keep_every if section.keep_every is not None else 0
    return min(written, section.keep + section.keep_best + for_good + 1)
