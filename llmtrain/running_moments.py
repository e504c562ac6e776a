"""Running mean and variance. EDiT's penalty uses them to find abnormal norms of pseudo-gradients, and metrics to find spikes of the
loss."""

from __future__ import annotations

from typing import Any

import torch

STATE_NAMES = ("count", "mean", "variance")


class RunningMoments:
    """Exponentially weighted mean and variance of every entry of a matrix, each with its own count k of values.

    The weights of the values x_1..x_k are ema (1 - ema)^(k - i), normalized to sum to 1. This normalization is the
    bias correction. The update with value x = x_k has a = ema / (1 - (1 - ema)^k):
    mean += a (x - mean); var = (1 - a) (var + a (x - mean_before)^2).
    """

    def __init__(self, shape: tuple[int, int], ema: float):
        self.ema = ema
        self.count = torch.zeros(shape, dtype=torch.int64, device="cpu")
        self.mean = torch.zeros(shape, dtype=torch.float64, device="cpu")
        self.variance = torch.zeros(shape, dtype=torch.float64, device="cpu")

    def z_scores(self, values: torch.Tensor) -> torch.Tensor:
        """Return (value - mean) / std. If the variance is 0, a value above the mean gives infinity, any other 0."""
        distance = values - self.mean
        z = distance / self.variance.sqrt()
        return torch.where(self.variance > 0, z, torch.where(distance > 0, torch.inf, 0.0))

    def update(self, values: torch.Tensor, include: torch.Tensor) -> None:
        """Add the entries of `values` for which `include` is true."""
        count = self.count + 1
        a = (self.ema / (1 - power(1 - self.ema, count))).clamp(max=1)
        distance = values - self.mean
        self.mean = torch.where(include, self.mean + a * distance, self.mean)
        self.variance = torch.where(include, (1 - a) * (self.variance + a * distance**2), self.variance)
        self.count = torch.where(include, count, self.count)

    def merge(self, rows: int) -> RunningMoments:
        """Return the moments merged over the rows, as `rows` equal rows. Each column has the moments of all of its values, with
        their present weights.

        With w_i = 1 - (1 - ema)^count_i:
        mean = sum w_i mean_i / sum w_i; variance = sum w_i (variance_i + (mean_i - mean)^2) / sum w_i.
        The merged count is the mean of the counts, rounded. It determines the weights of later values.
        """
        weight = 1 - power(1 - self.ema, self.count)
        weight = weight / weight.sum(0).clamp(min=1e-300)  # without values, the moments stay zero
        mean = (weight * self.mean).sum(0)
        pooled = RunningMoments((rows, len(mean)), self.ema)
        pooled.count[:] = self.count.double().mean(0).round().long()
        pooled.mean[:] = mean
        pooled.variance[:] = (weight * (self.variance + (self.mean - mean) ** 2)).sum(0)
        return pooled

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return count, mean and variance."""
        return self.count, self.mean, self.variance

    def state_dict(self) -> dict[str, Any]:
        """Return plain lists by name."""
        return {key: getattr(self, key).tolist() for key in STATE_NAMES}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key in STATE_NAMES:
            setattr(self, key, torch.tensor(state[key], dtype=getattr(self, key).dtype, device="cpu"))


def power(base: float, exponents: torch.Tensor) -> torch.Tensor:
    """Return `base` to the power of each of the `exponents` (integers of at least 0), in float64. The result has the same bits on
    every processor, whereas the rounding of torch.pow depends on the vector instructions."""
    result, square = torch.ones(exponents.shape, dtype=torch.float64, device="cpu"), base
    while exponents.any():
        result = torch.where(exponents % 2 == 1, result * square, result)
        square, exponents = square * square, exponents // 2
    return result
