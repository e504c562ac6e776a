"""Tests of the fingerprint of anchors and momenta, which should be equal on all replicas, and of norms in half precision."""

from __future__ import annotations

import pytest
import torch

from llmtrain.parallel.engine import Block
from llmtrain.sync.anchors import Anchors
from llmtrain.sync.block_sync import BlockSquares

DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def anchors(anchor: list[torch.Tensor], momentum: list[torch.Tensor]) -> Anchors:
    made = Anchors([Block(f"block {i}", [torch.zeros_like(flat)]) for i, flat in enumerate(anchor)], ["momentum"])
    made.load_state_dict({"anchor": anchor, "momentum": momentum})
    return made


def drawn(dtype: torch.dtype, seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return anchors and momenta of three blocks. All sizes are equal, so that blocks and kinds can be swapped."""
    generator = torch.Generator().manual_seed(seed)
    flats = torch.randn(6, 5, generator=generator).to(dtype)
    return list(flats[:3]), list(flats[3:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_values_have_equal_fingerprints(dtype: torch.dtype) -> None:
    ours, theirs = anchors(*drawn(dtype)).fingerprint(), anchors(*drawn(dtype)).fingerprint()
    assert ours == theirs
    assert 0 <= ours < 2**53  # metrics carry it as a float


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bit_anywhere_changes_it(dtype: torch.dtype) -> None:
    usual = anchors(*drawn(dtype)).fingerprint()
    for which in (0, 1):
        for block in range(3):
            for element in range(5):
                changed = drawn(dtype)
                bits = changed[which][block].view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
                bits[element] ^= 1
                assert anchors(*changed).fingerprint() != usual


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_in_another_order_change_it(dtype: torch.dtype) -> None:
    anchor, momentum = drawn(dtype)
    usual = anchors(anchor, momentum).fingerprint()
    assert anchors([anchor[1], anchor[0], anchor[2]], momentum).fingerprint() != usual
    assert anchors(anchor, [momentum[0], momentum[2], momentum[1]]).fingerprint() != usual
    assert anchors(momentum, anchor).fingerprint() != usual


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_half_precision_are_not_rounded_to_it(dtype: torch.dtype) -> None:
    values = torch.full((4096,), 5.0, dtype=dtype)
    squares = BlockSquares()
    squares.add(values.clone(), values)
    assert squares.mean.item() == 25 * 4096 and squares.distance.item() == 0
