"""Anchors and the outer optimizer's state: flat tensors, one of each per block, on the device or offloaded to the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from llmtrain.parallel.engine import Block
from llmtrain.pieces import pieces
from llmtrain.sync.offload import StreamedCopy, StreamOffload

ANCHOR = "anchor"
"""Name of the anchors in `Anchors.kept` and in checkpoints."""
BlockTensors = list[torch.Tensor | None]
"""One flat tensor per block; None for a block without one."""
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by bytes per element, to read the bits of a float tensor."""


class Anchors:
    """Anchors (the results of the last synchronization) and the outer optimizer's state, sharded like the parameters.

    With `offload`, they are kept in pinned CPU memory. `load` then returns copies on the device, which stay
    there until `release`; `prefetch` starts these copies earlier. `write_back` copies changed values back to the CPU.
    """

    def __init__(self, blocks: list[Block], state: Sequence[str] = (), offload: StreamOffload | None = None):
        """Create anchors that are not set. `state` has the names of the outer optimizer's tensors (`OuterSection.state`)."""
        self.blocks = blocks
        self.kept: dict[str, list[torch.Tensor]] = {ANCHOR: [], **{name: [] for name in state}}
        """Tensors by name, one per block: the anchors, then the outer optimizer's state."""
        self._offload = offload
        self._device_copies: dict[tuple[str, int], StreamedCopy] = {}  # by name and block

    @property
    def anchor(self) -> list[torch.Tensor]:
        """Anchors by block, in the memory in which they are kept."""
        return self.kept[ANCHOR]

    def snapshot(self) -> None:
        """Make the current parameters the anchor and set the outer optimizer's state to zero."""
        self._reset()
        for name, kept in self.kept.items():  # the anchor first: the state takes its shapes
            flats = map(flatten, self.blocks) if name == ANCHOR else map(torch.zeros_like, self.anchor)
            kept[:] = [self._store(index, flat) for index, flat in enumerate(flats)]

    @property
    def is_set(self) -> bool:
        return bool(self.anchor)

    def prefetch(self, index: int, with_state: bool = False) -> None:
        """Start copying a block's anchor to the device, and with `with_state` also the outer optimizer's state. Without offload, do
        nothing."""
        if self._offload is None:
            return
        for name in self.kept if with_state else (ANCHOR,):
            if (name, index) not in self._device_copies:
                self._device_copies[name, index] = self._offload.prefetch(self.kept[name][index])

    def release(self, index: int) -> None:
        """Release the device copies that `load` returned for a block."""
        for name in self.kept:
            if (fetched := self._device_copies.pop((name, index), None)) is not None:
                fetched.release()

    def iter_prefetched(self, indices: Sequence[int], with_state: bool = False) -> Iterator[int]:
        """Yield the block indices in order. While the caller works on a block, the anchor (and state) of the next block
        is copied to the device. A block is released when the caller asks for the next index."""
        for place, index in enumerate(indices):
            for near in indices[place : place + 2]:
                self.prefetch(near, with_state)
            yield index
            self.release(index)

    def load(self, index: int) -> list[torch.Tensor]:
        """Return a block's anchor, followed by the outer optimizer's state, on the device of the block's parameters."""
        self.prefetch(index, with_state=True)
        return [self._on_device(name, index) for name in self.kept]

    def load_anchor(self, index: int) -> torch.Tensor:
        """Return a block's anchor on the device of the block's parameters."""
        self.prefetch(index)
        return self._on_device(ANCHOR, index)

    def write_back(self, index: int, changed: Sequence[torch.Tensor]) -> None:
        """Start copying `changed` back to the CPU: the tensors that `load` returned and the outer step has changed. Without offload,
        do nothing, because `load` returned the originals."""
        if self._offload is not None:
            for kept, tensor in zip(self.kept.values(), changed, strict=True):
                self._offload.write_back(kept[index], tensor)

    def state_dict(self) -> dict[str, list[torch.Tensor]]:
        """Return lists of tensors by block, without copying them. Waits for copies in flight."""
        self._wait()
        return {name: list(kept) for name, kept in self.kept.items()}

    def fingerprint(self) -> torch.Tensor:
        """Return a checksum of the bits of all anchors and the state: an int64 scalar on their device, below 2^53, so that a
        float64 holds it exactly. It is equal on ranks that hold the same shard of the same values. It detects one changed bit if
        elements have at most 4 bytes."""
        self._wait()
        total = torch.zeros((), dtype=torch.int64, device=self.anchor[0].device)
        for number, flat in enumerate(itertools.chain(*self.kept.values()), 1):
            total += number * flat.view(INTEGERS[flat.element_size()]).sum(dtype=torch.int64)
        return total.remainder(2**53)  # sums wrap modulo 2^64, which does not change the remainder

    def load_state_dict(self, state: dict[str, list[torch.Tensor]]) -> None:
        """Load copies of the tensors that `state_dict` returned."""
        self._reset()
        for name, kept in self.kept.items():
            kept[:] = [self._store(index, tensor.clone()) for index, tensor in enumerate(state[name])]

    def _reset(self) -> None:
        self._wait()
        for index in range(len(self.blocks)):
            self.release(index)

    def _store(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor as it is kept: in host memory with offload, otherwise on the block's device."""
        if self._offload is not None:
            return self._offload.to_host(tensor)
        return tensor.to(self.blocks[index].shards[0].device)

    def _on_device(self, name: str, index: int) -> torch.Tensor:
        return self.kept[name][index] if self._offload is None else self._device_copies[name, index].use()

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
    """Return the tensors that hold the block's parameters, without copying: `block.flat` if the block has one, else the shards."""
    return block.shards if block.flat is None else [block.flat]


def parts_of(shards: Sequence[torch.Tensor], *flats: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield (part of a shard, same part of each flat tensor), in order. A flat tensor holds the values of all shards, end to end.
    Parts are views, short enough for a processor's cache. A shard that is not contiguous is one part, in the shard's shape."""
    parts = [flat.split([shard.numel() for shard in shards]) for flat in flats]
    for shard, *of_shard in zip(shards, *parts, strict=True):
        if shard.is_contiguous():
            yield from pieces(shard.view(-1), *of_shard)
        else:
            yield shard, *(part.view(shard.shape) for part in of_shard)
