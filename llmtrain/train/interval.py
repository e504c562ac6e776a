"""Sums that one rank keeps between two log lines."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmtrain.train.device_numbers import Number


@dataclass
class IntervalMetrics:
    """This rank's sums since its last log line. What depends on the device's results stays there until then, so that training does
    not wait for it."""

    loss: Number = 0.0
    grad_norm: Number = 0.0
    steps: int = 0
    gradients: Number = 0
    """Inner optimizer steps. Pulls, and steps skipped for a non-finite gradient, do not count."""
    predicted_tokens: Number = 0
    padding: Number = 0
    """Padded positions, beyond the ends of documents."""
    step_seconds: float = 0.0
    data_seconds: float = 0.0

    def add_gradient(
        self, tokens: int, padding: int, loss: torch.Tensor, grad_norm: torch.Tensor, skipped: Number
    ) -> Number:
        """Add a gradient of `tokens` tokens, with their summed `loss`. Add nothing if its step was skipped, in which case `skipped`
        is 1, otherwise 0. Return the number of tokens that the optimizer's step has used."""
        if isinstance(skipped, torch.Tensor):
            loss, grad_norm = (torch.where(skipped.bool(), 0.0, number) for number in (loss, grad_norm))
        used = 1 - skipped
        self.loss = self.loss + loss
        self.grad_norm = self.grad_norm + grad_norm
        self.gradients = self.gradients + used
        self.predicted_tokens = self.predicted_tokens + used * tokens
        self.padding = self.padding + used * padding
        return used * tokens
