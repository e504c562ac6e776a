"""Anchor and outer momentum: one flat tensor a block each, on the device or offloaded to the CPU."""

from __future__ import annotations

import torch

from llmtrain.parallel.engine import Block

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Anchors:
    """The parameters after the last synchronisation, sharded like the parameters, block by block.

    With `offload` they rest in (pinned) CPU memory; `load` brings a block's to the device and `store` takes the
    changed ones back.
    """

    def __init__(self, blocks: list[Block], with_momentum: bool, offload: bool):
        self.blocks, self.with_momentum = blocks, with_momentum
        self.anchor: list[torch.Tensor] = []
        self.momentum: list[torch.Tensor] = []
        self._offload = offload and any(shard.is_cuda for block in blocks for shard in block.shards)

    def take(self) -> None:
        """The parameters as they are now become the anchor; momentum starts at zero."""
        self.anchor = [self._rest(i, flatten(block)) for i, block in enumerate(self.blocks)]
        zeros = {"pin_memory": self._offload}  # zeros_like would not take that over
        self.momentum = [torch.zeros_like(anchor, **zeros) for anchor in self.anchor] if self.with_momentum else []

    @property
    def taken(self) -> bool:
        return bool(self.anchor)

    def load(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(anchor, momentum) of a block on the device of its parameters."""
        device = self.blocks[index].shards[0].device
        momentum = self.momentum[index].to(device, non_blocking=True) if self.with_momentum else None
        return self.anchor[index].to(device, non_blocking=True), momentum

    def load_anchor(self, index: int) -> torch.Tensor:
        """A block's anchor on the device of its parameters."""
        return self.anchor[index].to(self.blocks[index].shards[0].device, non_blocking=True)

    def store(self, index: int, anchor: torch.Tensor, momentum: torch.Tensor | None) -> None:
        """Keep what `load` gave and the outer step changed."""
        if self._offload:
            self.anchor[index].copy_(anchor, non_blocking=True)
            if momentum is not None:
                self.momentum[index].copy_(momentum, non_blocking=True)

    def state_dict(self) -> dict[str, list[torch.Tensor]]:
        """The tensors themselves, by block."""
        if self._offload:
            torch.cuda.synchronize()  # `store` does not wait for its copies
        return {"anchor": self.anchor, "momentum": self.momentum}

    def fingerprint(self) -> int:
        """A sum over the bits of all anchors and momenta, below 2^53: equal on ranks that hold the same shard of the same
        values. One changed bit changes it."""
        total = 0
        for number, flat in enumerate([*self.anchor, *self.momentum], 1):
            bits = flat.view(INTEGERS[flat.element_size()])
            total += number * int(bits.sum(dtype=torch.int64))
        return total % 2**53

    def load_state_dict(self, state: dict[str, list[torch.Tensor]]) -> None:
        """The inverse of `state_dict`; tensors are copied."""
        self.anchor = [self._rest(i, tensor.clone()) for i, tensor in enumerate(state["anchor"])]
        self.momentum = [self._rest(i, tensor.clone()) for i, tensor in enumerate(state["momentum"])]

    def _rest(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu().pin_memory() if self._offload else tensor.to(self.blocks[index].shards[0].device)


def flatten(block: Block) -> torch.Tensor:
    """A copy of the block's shards, end to end."""
    return torch.cat([shard.reshape(-1) for shard in block.shards])


def unflatten_into(flat: torch.Tensor, block: Block) -> None:
    """Write a flat tensor back into the block's shards."""
    for shard, part in zip(block.shards, flat.split([shard.numel() for shard in block.shards]), strict=True):
        shard.copy_(part.view(shard.shape))
