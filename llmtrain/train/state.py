"""Progress of a run on one rank: the counters that the training loop keeps and that checkpoints store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from llmtrain.reshard import by_replica, first, mean, mean_over_replicas, own_step, resharded, rules_of, split_evenly

Number = torch.Tensor | float
"""A scalar on the device, or a number that the host knows."""


def host_numbers(numbers: Mapping[str, Number]) -> dict[str, float]:
    """Return all numbers as plain numbers on the host. Waits for the device if it has any of them."""
    return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in numbers.items()}


@dataclass
class TrainState:
    """Counters of one rank. Fields with a rule are stored in checkpoints and resharded by it."""

    total_steps: int
    """Steps of the run."""
    step: int = resharded(0, by=own_step)
    """Steps of this replica. With A-EDiT, a fast replica takes more than `total_steps`."""
    global_step: int = 0
    """Step of the run that all ranks agree on. Equal to `step`, except in timed rounds."""
    previous_global_step: int = 0
    """Global step at the previous agreement."""
    gradients: Number = resharded(0, by=mean)
    """Inner optimizer steps of this replica. Pulls, and steps skipped for a non-finite gradient, do not count."""
    skipped: Number = resharded(0, by=mean_over_replicas)
    """Steps of this replica skipped because the gradient was not finite (`optim.nonfinite`). If steps can be skipped,
    this count and those that depend on it are scalars on the device, so that training does not wait for them."""
    skipped_in_a_row: Number = resharded(0, by=by_replica(max))
    """Steps of this replica skipped since its last finite gradient."""
    predicted_tokens: int = resharded(0, by=split_evenly)
    """Tokens that this rank has trained on."""
    last_evaluated: int = resharded(-1, by=first)
    """Global step of the last validation."""
    last_saved: int = -1
    """Global step of the last checkpoint."""

    @property
    def is_done(self) -> bool:
        """Return whether the run has reached its last step."""
        return self.global_step >= self.total_steps

    @property
    def is_first_step(self) -> bool:
        """Return whether the last agreement on a global step was the run's first."""
        return self.previous_global_step == 0

    def advance(self, global_step: int | None) -> bool:
        """Record `global_step` after a step of this replica; None if the ranks do not agree on a global step now.
        Return whether they agree. Only then may a rank issue collectives for logging, validation or checkpoints."""
        if global_step is None:
            return False
        self.previous_global_step, self.global_step = self.global_step, global_step
        return True

    def is_due(self, every: int | None) -> bool:
        """Return whether the global step has reached or passed a multiple of `every` since the previous agreement. False for
        None."""
        return every is not None and self.global_step // every > self.previous_global_step // every

    def count_gradient(self, tokens: int, skipped: Number) -> None:
        """Count a step that computed a gradient from `tokens` tokens of this rank. `skipped` is 1 if the gradient was not used,
        otherwise 0."""
        self.predicted_tokens += tokens
        self.gradients = self.gradients + (1 - skipped)
        self.skipped = self.skipped + skipped
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * skipped

    def state_dict(self) -> dict[str, Any]:
        """Return the fields that checkpoints store."""
        return host_numbers({name: getattr(self, name) for name in rules_of(type(self))})

    def load_state_dict(self, state: dict[str, Any], global_step: int) -> None:
        """Restore the stored fields from a checkpoint of `global_step`. Other entries of `state` are ignored."""
        for name in rules_of(type(self)):
            setattr(self, name, state[name])
        self.global_step = self.previous_global_step = self.last_saved = global_step
