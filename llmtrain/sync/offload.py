"""Tensors that rest in CPU memory while the device has no need of them, and their copies there and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Copies(Protocol):
    """Copies that run beside what the device computes, in the order in which they were asked for."""

    def rest(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's values where they can rest; waits for the copy."""
        ...

    def bring(self, resting: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start copying a resting tensor to the device. What comes back gives the copy, safe to use on the current stream."""
        ...

    def take(self, resting: torch.Tensor, changed: torch.Tensor) -> None:
        """Start copying `changed` from the device over a resting tensor; it is not to be changed any more."""
        ...

    def wait(self) -> None:
        """Until all copies are made: before the host reads what rests."""
        ...


class SideStream:
    """Copies of a GPU on a stream of its own, to and from pinned memory."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def rest(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu().pin_memory()

    def bring(self, resting: torch.Tensor) -> Callable[[], torch.Tensor]:
        with torch.cuda.stream(self._stream):
            copy = resting.to(self._device, non_blocking=True)
            arrived = self._stream.record_event()

        def use() -> torch.Tensor:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(arrived)
            copy.record_stream(
                current
            )  # its memory is the other stream's: not to be given away while this one works on it
            return copy

        return use

    def take(self, resting: torch.Tensor, changed: torch.Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            resting.copy_(changed, non_blocking=True)
        changed.record_stream(self._stream)

    def wait(self) -> None:
        self._stream.synchronize()


def offload_copies(device: torch.device) -> Copies | None:
    """How tensors of a device are offloaded; None for a CPU, whose memory they are in already."""
    return SideStream(device) if device.type == "cuda" else None
