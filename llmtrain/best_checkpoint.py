"""Complete checkpoints of a run, and the best: of those validated at their own step, the one with the lowest loss.

Imports no torch, so that commands that only look at a run answer at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEST = "best"
"""Name of the best checkpoint where a step is asked for."""
STATE_FILE = "state.json"
"""File of a checkpoint that holds its state without the tensors. It is written last."""


@dataclass(frozen=True)
class CheckpointLoss:
    """Validation loss of a checkpoint at its step, over `tokens` tokens of the run's own validation text."""

    loss: float
    tokens: int


def complete_checkpoints(run: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a run by step, oldest first."""
    found = (run / "checkpoints").glob(f"step-{'[0-9]' * 8}/{STATE_FILE}")
    return {int(path.parent.name.removeprefix("step-")): path.parent for path in sorted(found)}


def loss_of(state: Mapping[str, Any]) -> CheckpointLoss | None:
    """Return the loss in the content of a state.json; None if it has no finite loss of its own step."""
    try:
        progress = state["ranks"][0]
        found = CheckpointLoss(progress["last_eval"]["loss"], progress["last_eval"]["tokens"])
        is_own = progress["last_evaluated"] == state["step"]
    except (KeyError, IndexError, TypeError):
        return None
    return found if is_own and math.isfinite(found.loss) else None


def read_loss(checkpoint: Path) -> CheckpointLoss | None:
    """Return the loss of a checkpoint; None also if its state.json can't be read."""
    try:
        return loss_of(json.loads((checkpoint / STATE_FILE).read_bytes()))
    except (OSError, ValueError):
        return None


def best_step(losses: Mapping[int, CheckpointLoss | None]) -> int | None:
    """Return the step with the lowest loss, the latest of equal ones; None if no step has a loss.

    Only losses over as many tokens as the latest one count, because `eval.tokens` may have been changed.
    """
    found = {step: loss for step, loss in losses.items() if loss is not None}
    if not found:
        return None
    tokens = found[max(found)].tokens
    return min((loss.loss, -step, step) for step, loss in found.items() if loss.tokens == tokens)[2]
