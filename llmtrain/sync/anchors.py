"""Anchor and outer momentum: one flat tensor a block each, on the device or offloaded to the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from llmtrain.parallel.engine import Block
from llmtrain.sync.offload import Brought, Copies

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Anchors:
    """The parameters after the last synchronisation, sharded like the parameters, block by block.

    With `copies` they rest in pinned CPU memory. `load` brings a block's to the device, where they stay until `release`, and
    `store` takes the changed ones back; what `bring` has announced is on its way by then.
    """

    def __init__(self, blocks: list[Block], with_momentum: bool, copies: Copies | None = None):
        self.blocks, self.with_momentum = blocks, with_momentum
        self.anchor: list[torch.Tensor] = []
        self.momentum: list[torch.Tensor] = []
        self._copies = copies
        self._brought: dict[tuple[int, bool], Brought] = {}  # by (block, is it momentum?)

    def take(self) -> None:
        """The parameters as they are now become the anchor; momentum starts at zero."""
        self._forget()
        self.anchor = [self._rest(i, flatten(block)) for i, block in enumerate(self.blocks)]
        start = self.anchor if self.with_momentum else []
        self.momentum = [self._rest(i, torch.zeros_like(anchor)) for i, anchor in enumerate(start)]

    @property
    def taken(self) -> bool:
        return bool(self.anchor)

    def bring(self, index: int, momentum: bool = False) -> None:
        """A block's anchor, and momentum, will be needed on the device."""
        if self._copies is None:
            return
        for is_momentum in (False, True) if momentum and self.with_momentum else (False,):
            if (index, is_momentum) not in self._brought:
                resting = (self.momentum if is_momentum else self.anchor)[index]
                self._brought[index, is_momentum] = self._copies.bring(resting)

    def release(self, index: int) -> None:
        """Nothing more will be done with what `load` gave of a block."""
        for is_momentum in (False, True):
            if (brought := self._brought.pop((index, is_momentum), None)) is not None:
                brought.release()

    def visit(self, indices: Sequence[int], momentum: bool = False) -> Iterator[int]:
        """The blocks one after another; while one is worked on, the next one's anchor (and momentum) is on its way."""
        for place, index in enumerate(indices):
            for near in indices[place : place + 2]:
                self.bring(near, momentum)
            yield index
            self.release(index)

    def load(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(anchor, momentum) of a block on the device of its parameters."""
        self.bring(index, momentum=True)
        return self.load_anchor(index), self._here(index, self.momentum, True) if self.with_momentum else None

    def load_anchor(self, index: int) -> torch.Tensor:
        """A block's anchor on the device of its parameters."""
        self.bring(index)
        return self._here(index, self.anchor, False)

    def store(self, index: int, anchor: torch.Tensor, momentum: torch.Tensor | None) -> None:
        """Keep what `load` gave and the outer step changed."""
        if self._copies is not None:
            self._copies.take(self.anchor[index], anchor)
            if momentum is not None:
                self._copies.take(self.momentum[index], momentum)

    def state_dict(self) -> dict[str, list[torch.Tensor]]:
        """The tensors themselves, by block."""
        self._settle()
        return {"anchor": self.anchor, "momentum": self.momentum}

    def fingerprint(self) -> int:
        """A sum over the bits of all anchors and momenta, below 2^53: equal on ranks that hold the same shard of the same
        values. One changed bit changes it."""
        self._settle()
        total = 0
        for number, flat in enumerate([*self.anchor, *self.momentum], 1):
            bits = flat.view(INTEGERS[flat.element_size()])
            total += number * int(bits.sum(dtype=torch.int64))
        return total % 2**53

    def load_state_dict(self, state: dict[str, list[torch.Tensor]]) -> None:
        """The inverse of `state_dict`; tensors are copied."""
        self._forget()
        self.anchor = [self._rest(i, tensor.clone()) for i, tensor in enumerate(state["anchor"])]
        self.momentum = [self._rest(i, tensor.clone()) for i, tensor in enumerate(state["momentum"])]

    def _forget(self) -> None:
        self._settle()
        for index in range(len(self.blocks)):
            self.release(index)

    def _rest(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        if self._copies is not None:
            return self._copies.rest(tensor)
        return tensor.to(self.blocks[index].shards[0].device)

    def _here(self, index: int, resting: list[torch.Tensor], is_momentum: bool) -> torch.Tensor:
        return resting[index] if self._copies is None else self._brought[index, is_momentum].use()

    def _settle(self) -> None:
        if self._copies is not None:
            self._copies.wait()


def flatten(block: Block) -> torch.Tensor:
    """A copy of the block's shards, end to end."""
    return torch.cat([shard.reshape(-1) for shard in block.shards])


def unflatten_into(flat: torch.Tensor, block: Block) -> None:
    """Write a flat tensor back into the block's shards."""
    for shard, part in zip(block.shards, flat.split([shard.numel() for shard in block.shards]), strict=True):
        shard.copy_(part.view(shard.shape))
