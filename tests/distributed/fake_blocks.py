"""Blocks of the fake engine: noise that all ranks know, and the parts that shard ranks hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch


@cache
def drawn(seed: tuple[int, ...], deviation: float, shape: tuple[int, ...]) -> np.ndarray:
    """Return normal noise. It is drawn once for all ranks and scenarios that use it, and is therefore read-only."""
    noise = np.random.default_rng(seed).normal(0.0, deviation, shape)
    noise.flags.writeable = False
    return noise


@dataclass(frozen=True)
class Part:
    """Part of a block that a shard rank holds: of every tensor, dimension 0 in equal pieces, the last ones shorter or empty."""

    shapes: list[tuple[int, ...]]
    places: np.ndarray
    """Indices of the part's elements in the flat block."""


@cache
def part_of(shapes: tuple[tuple[int, ...], ...], shard: int, rank: int) -> Part:
    pieces, places, start = [], [], 0
    for shape in shapes:
        rows = math.ceil(shape[0] / shard)
        piece = np.arange(start, start + math.prod(shape)).reshape(shape)[rank * rows : (rank + 1) * rows]
        start += math.prod(shape)
        pieces.append(piece.shape)
        places.append(piece.reshape(-1))
    return Part(pieces, np.concatenate(places))


def cut(flat: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Return tensors of these shapes that share the memory of the flat one."""
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
