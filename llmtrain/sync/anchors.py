"""Anchor and outer momentum: one flat tensor a block each, on the device or offloaded to the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from llmtrain.parallel.engine import Block
from llmtrain.sync.offload import DeviceCopy, HostOffload

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Anchors:
    """The parameters after the last synchronization, sharded like the parameters, block by block.

    With `copies` they rest in pinned CPU memory. `load` brings a block's to the device, where they stay until `release`, and
    `store` takes the changed ones back; what `bring` has announced is on its way by then.
    """

    def __init__(self, blocks: list[Block], with_momentum: bool, copies: HostOffload | None = None):
        self.blocks, self.with_momentum = blocks, with_momentum
        self.anchor: list[torch.Tensor] = []
        self.momentum: list[torch.Tensor] = []
        self._offload = copies
        self._device_copies: dict[tuple[int, bool], DeviceCopy] = {}  # by (block, is it momentum?)

    def snapshot(self) -> None:
        """The parameters as they are now become the anchor; momentum starts at zero."""
        self._reset()
        self.anchor = [self._to_host(i, flatten(block)) for i, block in enumerate(self.blocks)]
        start = self.anchor if self.with_momentum else []
        self.momentum = [self._to_host(i, torch.zeros_like(anchor)) for i, anchor in enumerate(start)]

    @property
    def is_set(self) -> bool:
        return bool(self.anchor)

    def prefetch(self, index: int, momentum: bool = False) -> None:
        """A block's anchor, and momentum, will be needed on the device."""
        if self._offload is None:
            return
        for is_momentum in (False, True) if momentum and self.with_momentum else (False,):
            if (index, is_momentum) not in self._device_copies:
                resting = (self.momentum if is_momentum else self.anchor)[index]
                self._device_copies[index, is_momentum] = self._offload.prefetch(resting)

    def release(self, index: int) -> None:
        """Nothing more will be done with what `load` gave of a block."""
        for is_momentum in (False, True):
            if (fetched := self._device_copies.pop((index, is_momentum), None)) is not None:
                fetched.release()

    def iter_prefetched(self, indices: Sequence[int], momentum: bool = False) -> Iterator[int]:
        """The blocks one after another; while one is worked on, the next one's anchor (and momentum) is on its way."""
        for place, index in enumerate(indices):
            for near in indices[place : place + 2]:
                self.prefetch(near, momentum)
            yield index
            self.release(index)

    def load(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(anchor, momentum) of a block on the device of its parameters."""
        self.prefetch(index, momentum=True)
        return self.load_anchor(index), self._on_device(index, self.momentum, True) if self.with_momentum else None

    def load_anchor(self, index: int) -> torch.Tensor:
        """A block's anchor on the device of its parameters."""
        self.prefetch(index)
        return self._on_device(index, self.anchor, False)

    def write_back(self, index: int, anchor: torch.Tensor, momentum: torch.Tensor | None) -> None:
        """Keep what `load` gave and the outer step changed."""
        if self._offload is not None:
            self._offload.write_back(self.anchor[index], anchor)
            if momentum is not None:
                self._offload.write_back(self.momentum[index], momentum)

    def state_dict(self) -> dict[str, list[torch.Tensor]]:
        """The tensors themselves, by block."""
        self._wait()
        return {"anchor": self.anchor, "momentum": self.momentum}

    def fingerprint(self) -> int:
        """A sum over the bits of all anchors and momenta, below 2^53: equal on ranks that hold the same shard of the same
        values. One changed bit changes it."""
        self._wait()
        total = 0
        for number, flat in enumerate([*self.anchor, *self.momentum], 1):
            bits = flat.view(INTEGERS[flat.element_size()])
            total += number * int(bits.sum(dtype=torch.int64))
        return total % 2**53

    def load_state_dict(self, state: dict[str, list[torch.Tensor]]) -> None:
        """The inverse of `state_dict`; tensors are copied."""
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
    """A copy of the block's shards, end to end."""
    return torch.cat([shard.reshape(-1) for shard in block.shards])


def unflatten_into(flat: torch.Tensor, block: Block) -> None:
    """Write a flat tensor back into the block's shards."""
    for shard, part in zip(block.shards, flat.split([shard.numel() for shard in block.shards]), strict=True):
        shard.copy_(part.view(shard.shape))
