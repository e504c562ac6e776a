"""Tensors that rest in CPU memory while the device has no need of them, and their copies there and back."""

from __future__ import annotations

from typing import Protocol

import torch


class DeviceCopy(Protocol):
    """A copy on the device, or on its way there."""

    def use(self) -> torch.Tensor:
        """The copy, safe to use on the current stream, and to change."""
        ...

    def release(self) -> None:
        """The current stream has been given all that it is to do with the copy: its memory may hold something else."""
        ...


class HostOffload(Protocol):
    """Copies that run beside what the device computes, in the order in which they were asked for."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's values where they can rest; waits for the copy."""
        ...

    def prefetch(self, resting: torch.Tensor) -> DeviceCopy:
        """Start copying a resting tensor to the device."""
        ...

    def write_back(self, resting: torch.Tensor, changed: torch.Tensor) -> None:
        """Start copying `changed` from the device over a resting tensor; it is not to be changed any more."""
        ...

    def synchronize(self) -> None:
        """Until all copies are made: before the host reads what rests."""
        ...


class StreamOffload:
    """Copies of a GPU on a stream of its own, to and from pinned memory."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu().pin_memory()

    def prefetch(self, resting: torch.Tensor) -> StreamedCopy:
        return StreamedCopy(resting, self._device, self._stream)

    def write_back(self, resting: torch.Tensor, changed: torch.Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            resting.copy_(changed, non_blocking=True)

    def synchronize(self) -> None:
        self._stream.synchronize()


class StreamedCopy:
    """A copy made by a side stream, in memory of that stream's.

    `release` rather than `record_stream`: the memory is free at once for the stream's next copy, which waits on the device.
    The host runs ahead by many blocks, and would find none of theirs free.
    """

    def __init__(self, resting: torch.Tensor, device: torch.device, side: torch.cuda.Stream):
        self._device, self._side = device, side
        with torch.cuda.stream(side):
            self._copy = resting.to(device, non_blocking=True)
            self._copied = side.record_event()

    def use(self) -> torch.Tensor:
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        return self._copy

    def release(self) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._device))


def host_offload(device: torch.device) -> HostOffload | None:
    """How tensors of a device are offloaded; None for a CPU, whose memory they are in already."""
    return StreamOffload(device) if device.type == "cuda" else None
