"""Pieces of long tensors that stay in a processor's cache while several operations work on them.

An operation of torch reads and writes complete tensors. On a CPU, a sequence of operations on a long tensor therefore
moves the tensor to and from memory once per operation. Carried out piece by piece, the sequence moves it only once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

PIECE_VALUES = 2**17
"""Values of one tensor in a piece, per thread: few enough to fit in a cache, and many enough that the calls cost little."""
GPU_COPY_VALUES = 2**24
"""Maximum number of values in a float64 copy on a GPU: 128 MiB of memory."""


def pieces(*tensors: torch.Tensor, values: int = PIECE_VALUES) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield views of the same rows of all tensors, piece by piece, with about `values` values of the first tensor per thread.

    The tensors must have equal numbers of rows (dimension 0). On a GPU, all rows are one piece, because starting an
    operation there costs too much for short pieces.
    """
    first = tensors[0]
    values *= torch.get_num_threads()
    if first.device.type != "cpu" or first.numel() <= values:
        yield tensors
        return
    rows = max(1, values * len(first) // first.numel())
    yield from zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def exact_norms(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the L2 norms of a flat tensor's pieces, float64 scalars, computed in float64."""
    # torch makes a copy in float64. With this copy, pieces of the usual length would not fit in a CPU's cache, and on a
    # GPU, a large fp32 tensor as a whole would need twice its own memory in addition.
    on_cpu = tensor.device.type == "cpu"
    values = PIECE_VALUES // 4 * torch.get_num_threads() if on_cpu else GPU_COPY_VALUES
    return [torch.linalg.vector_norm(part, dtype=torch.float64) for part in tensor.split(values)]
