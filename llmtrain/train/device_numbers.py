"""Numbers that training counts on the device, so that the host does not wait for them, and how the host gets them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

Number = torch.Tensor | float
"""A scalar on the device, or a number that the host knows."""


def host_numbers(numbers: Mapping[str, Number]) -> dict[str, float]:
    """Return all numbers as the host's. Waits for the device if one of them is there."""
    return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in numbers.items()}


class DeviceNumbers:
    """Numbers of one moment, on their way to the host. On a GPU the host continues while they are computed and copied."""

    def __init__(self, numbers: Mapping[str, Number]):
        """Start copying the scalars among `numbers` that are on a GPU."""
        on_gpu = {name: value for name, value in numbers.items() if isinstance(value, torch.Tensor) and value.is_cuda}
        self._known = host_numbers({name: value for name, value in numbers.items() if name not in on_gpu})
        self._names = list(on_gpu)
        self._event: torch.cuda.Event | None = None
        self._copied: torch.Tensor | None = None
        if on_gpu:
            values = torch.stack([value.double() for value in on_gpu.values()])
            self._copied = torch.empty_like(values, device="cpu", pin_memory=True)
            self._copied.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_ready(self) -> bool:
        """Return whether `read` would return without waiting."""
        return self._event is None or self._event.query()

    def read(self) -> dict[str, float]:
        """Return the numbers as the host's, once the device has computed them."""
        if self._event is None:
            return self._known
        self._event.synchronize()
        return {**self._known, **dict(zip(self._names, self._copied.tolist(), strict=True))}
