"""Anchors and outer momenta: one flat tensor per block, on the device or offloaded to the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from llmtrain.parallel.engine import Block
from llmtrain.pieces import pieces
from llmtrain.sync.offload import StreamedCopy, StreamOffload

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by bytes per element, to read the bits of a float tensor."""


class Anchors:
    """Anchors (the parameters that the last synchronization gave) and outer momenta, sharded like the parameters.

    With `copies`, the offload, they are kept in pinned CPU memory. `load` then returns copies on the device, which stay
    there until `release`; `prefetch` starts these copies earlier. `write_back` copies changed values back to the CPU.
    """

    def __init__(self, blocks: list[Block], with_momentum: bool, copies: StreamOffload | None = None):
        self.blocks, self.with_momentum = blocks, with_momentum
        self.anchor: list[torch.Tensor] = []
        self.momentum: list[torch.Tensor] = []
        self._offload = copies
        self._device_copies: dict[tuple[int, bool], StreamedCopy] = {}  # by (block, is_momentum)

    def snapshot(self) -> None:
        """Make the current parameters the anchor and set the momentum to zero."""
        self._reset()
        self.anchor = [self._to_host(i, flatten(block)) for i, block in enumerate(self.blocks)]
        start = self.anchor if self.with_momentum else []
        self.momentum = [self._to_host(i, torch.zeros_like(anchor)) for i, anchor in enumerate(start)]

    @property
    def is_set(self) -> bool:
        return bool(self.anchor)

    def prefetch(self, index: int, momentum: bool = False) -> None:
        """Start copying a block's anchor (with `momentum`, its momentum too) to the device. Without offload, do nothing."""
        if self._offload is None:
            return
        for is_momentum in (False, True) if momentum and self.with_momentum else (False,):
            if (index, is_momentum) not in self._device_copies:
                resting = (self.momentum if is_momentum else self.anchor)[index]
                self._device_copies[index, is_momentum] = self._offload.prefetch(resting)

    def release(self, index: int) -> None:
        """Release the device copies that `load` returned for a block."""
        for is_momentum in (False, True):
            if (fetched := self._device_copies.pop((index, is_momentum), None)) is not None:
                fetched.release()

    def iter_prefetched(self, indices: Sequence[int], momentum: bool = False) -> Iterator[int]:
        """Yield the block indices in order. While the caller works on a block, the anchor (and momentum) of the next one
        is copied to the device. A block is released when the caller asks for the next one."""
        for place, index in enumerate(indices):
            for near in indices[place : place + 2]:
                self.prefetch(near, momentum)
            yield index
            self.release(index)

    def load(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a block's (anchor, momentum) on the device of its parameters. The momentum is None if none is kept."""
        self.prefetch(index, momentum=True)
        return self.load_anchor(index), self._on_device(index, self.momentum, True) if self.with_momentum else None

    def load_anchor(self, index: int) -> torch.Tensor:
        """Return a block's anchor on the device of its parameters."""
        self.prefetch(index)
        return self._on_device(index, self.anchor, False)

    def write_back(self, index: int, anchor: torch.Tensor, momentum: torch.Tensor | None) -> None:
        """Start copying the tensors that `load` returned, and the outer step has changed, back to the CPU. Without offload,
        do nothing, because `load` returned the originals."""
        if self._offload is not None:
            self._offload.write_back(self.anchor[index], anchor)
            if momentum is not None:
                self._offload.write_back(self.momentum[index], momentum)

    def state_dict(self) -> dict[str, list[torch.Tensor]]:
        """Return lists of tensors by block, without copying them. Waits for copies in flight."""
        self._wait()
        return {"anchor": self.anchor, "momentum": self.momentum}

    def fingerprint(self) -> torch.Tensor:
        """Return a checksum of the bits of all anchors and momenta: an int64 scalar where they are, below 2^53, which a float64
        holds exactly. It is equal on ranks that hold the same shard of the same values. It detects one changed bit if elements
        have at most 4 bytes."""
        self._wait()
        total = torch.zeros((), dtype=torch.int64, device=self.anchor[0].device)
        for number, flat in enumerate([*self.anchor, *self.momentum], 1):
            total += number * flat.view(INTEGERS[flat.element_size()]).sum(dtype=torch.int64)
        return total.remainder(2**53)  # of sums modulo 2^64, which is the same

    def load_state_dict(self, state: dict[str, list[torch.Tensor]]) -> None:
        """Load copies of the tensors that `state_dict` returned."""
        self._reset()
        self.anchor = [self._to_host(i, tensor.clone()) for i, tensor in enumerate(state["anchor"])]
        self.momentum = [self._to_host(i, tensor.clone()) for i, tensor in enumerate(state["momentum"])]

    def _reset(self) -> None:
        self._wait()
        for index in range(len(self.blocks)):
            self.release(index)

    def _to_host(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        if self._offload is not None:
            return self._offload.to_host(tensor)
        return tensor.to(self.blocks[index].shards[0].device)

    def _on_device(self, index: int, resting: list[torch.Tensor], is_momentum: bool) -> torch.Tensor:
        return resting[index] if self._offload is None else self._device_copies[index, is_momentum].use()

    def _wait(self) -> None:
        if self._offload is not None:
            self._offload.synchronize()


def flatten(block: Block) -> torch.Tensor:
    """Return a copy of the block's shards, concatenated into one flat tensor."""
    return torch.cat([shard.reshape(-1) for shard in block.shards]) if block.flat is None else block.flat.clone()


def flat_view(block: Block) -> torch.Tensor:
    """Return the block's shards as one flat tensor that the caller must not change: `block.flat` itself, or else a copy."""
    return flatten(block) if block.flat is None else block.flat


def unflatten_into(flat: torch.Tensor, block: Block) -> None:
    """Copy a flat tensor into the block's shards."""
    if block.flat is not None:
        block.flat.copy_(flat)
        return
    for shard, part in zip(block.shards, flat.split([shard.numel() for shard in block.shards]), strict=True):
        shard.copy_(part.view(shard.shape))


def parameter_parts(block: Block) -> list[torch.Tensor]:
    """Return the tensors that hold the block's parameters, not copies: one flat tensor if there is one, else the shards."""
    return block.shards if block.flat is None else [block.flat]


def parts_of(shards: Sequence[torch.Tensor], *flats: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield (part of a shard, same part of each flat tensor), in order. Parts are views, short enough for a processor's cache.
    A shard that is not contiguous is one part in its own shape. A flat tensor has the values of all shards, end to end."""
    parts = [flat.split([shard.numel() for shard in shards]) for flat in flats]
    for shard, *of_shard in zip(shards, *parts, strict=True):
        if shard.is_contiguous():
            yield from pieces(shard.view(-1), *of_shard)
        else:
            yield shard, *(part.view(shard.shape) for part in of_shard)
