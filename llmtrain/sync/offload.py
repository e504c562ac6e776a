"""CPU offload for anchors: pinned host tensors, copied to and from the GPU on a side stream."""

from __future__ import annotations

import torch


class StreamOffload:
    """Offload from a GPU to pinned memory. Copies run on a side stream, in the order in which they are requested."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to host memory, wait for the copy, and return it."""
        # `cpu().pin_memory()` would copy twice.
        host_copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
        return host_copy.copy_(tensor)

    def prefetch(self, host_copy: torch.Tensor) -> StreamedCopy:
        """Start copying `host_copy`, a tensor from `to_host`, to the device."""
        return StreamedCopy(host_copy, self._device, self._stream)

    def write_back(self, host_copy: torch.Tensor, changed: torch.Tensor) -> None:
        """Start copying `changed` to the host tensor `host_copy`. The caller must not change `changed` again."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host_copy.copy_(changed, non_blocking=True)

    def synchronize(self) -> None:
        """Wait for all copies. Callers do this before the host reads offloaded tensors."""
        self._stream.synchronize()


class StreamedCopy:
    """A copy made by a side stream, in memory allocated by that stream. It may still be in flight.

    `release` takes the place of `record_stream`. It makes the side stream wait for the current stream, so the allocator can
    give the memory to the side stream's next copy at once. With `record_stream`, the allocator would wait until the device
    is done with the memory. Because the host runs many blocks ahead of the device, all of their copies would then exist at once.
    """

    def __init__(self, host_copy: torch.Tensor, device: torch.device, side: torch.cuda.Stream):
        self._device, self._side = device, side
        with torch.cuda.stream(side):
            self._copy = host_copy.to(device, non_blocking=True)
            self._copied = side.record_event()

    def use(self) -> torch.Tensor:
        """Return the copy, safe to read and change on the current stream."""
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        return self._copy

    def release(self) -> None:
        """Free the memory for reuse after the work that is queued on the current stream. No later work may use the copy."""
        self._side.wait_stream(torch.cuda.current_stream(self._device))


def host_offload(device: torch.device) -> StreamOffload | None:
    """Return the offload for a device's tensors; None for a CPU, whose tensors are in host memory already."""
    return StreamOffload(device) if device.type == "cuda" else None
