"""DeepSpeed's layout of parameters in flat tensors, and the conversion to full parameters and back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class FlatGroup:
    """Group of parameters of which every rank of a shard group holds a part: one flat tensor of `size` elements.

    ZeRO-3 (`by_parameter`) cuts each parameter into `ranks` equal parts, and a rank's tensor is its parts end to
    end. ZeRO-1 and 2 put the parameters end to end and cut the result. Padding fills the last part.
    """

    names: list[str]
    shapes: list[torch.Size]
    ranks: int
    size: int
    by_parameter: bool

    def __post_init__(self) -> None:
        total = sum(math.prod(shape) for shape in self.shapes)
        fits = self.size == sum(self._widths()) if self.by_parameter else self.size * self.ranks >= total
        assert fits, (self.names, self.size, self.ranks)

    def full_tensors(self, gathered: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parameters by name, from all ranks' tensors [ranks, size]."""
        if self.by_parameter:
            parts = gathered.split(self._widths(), dim=1)
        else:
            numels = [math.prod(shape) for shape in self.shapes]
            flat = gathered.reshape(-1)
            parts = flat[: sum(numels)].split(numels)
        return {
            name: part.reshape(-1)[: math.prod(shape)].view(shape)
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }

    def part(self, full: Mapping[str, torch.Tensor], rank: int) -> torch.Tensor:
        """Return a rank's tensor [size] of full parameters, with zeros as padding."""
        flats = [full[name].reshape(-1) for name in self.names]
        if not self.by_parameter:
            flat = torch.cat(flats)
            return _padded(flat[rank * self.size : (rank + 1) * self.size], self.size)
        return torch.cat(
            [
                _padded(flat[rank * width : (rank + 1) * width], width)
                for flat, width in zip(flats, self._widths(), strict=True)
            ]
        )

    def padding(self, rank: int) -> Iterator[slice]:
        """Yield the slices of a rank's tensor that are padding. Some may be empty."""
        start = 0
        numels = [math.prod(shape) for shape in self.shapes]
        widths = self._widths() if self.by_parameter else [self.size]
        for numel, width in zip(numels if self.by_parameter else [sum(numels)], widths, strict=True):
            used = min(max(numel - rank * width, 0), width)
            yield slice(start + used, start + width)
            start += width

    def _widths(self) -> list[int]:
        """Return how many elements each parameter has in a rank's tensor that is cut by parameter."""
        return [math.ceil(math.prod(shape) / self.ranks) for shape in self.shapes]


def _padded(flat: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(flat, (0, size - flat.numel()))
