"""Pieces of long tensors, which have each row once and in order, and norms that are summed in float64."""

from __future__ import annotations

import pytest
import torch

from llmtrain.pieces import exact_norms, pieces


@pytest.mark.parametrize("rows", [1, 2, 9, 10, 11, 40])
@pytest.mark.parametrize("width", [1, 3])
def test_pieces_are_views_of_every_row_once(rows: int, width: int) -> None:
    first, second = torch.arange(rows * width).view(rows, width), torch.arange(rows)
    parts = list(pieces(first, second, values=10))
    assert torch.equal(torch.cat([part for part, _ in parts]), first)
    assert torch.equal(torch.cat([part for _, part in parts]), second)
    assert all(part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for part, _ in parts)
    assert all(part.numel() <= max(10 * torch.get_num_threads(), width) for part, _ in parts)


def test_a_gpus_tensors_are_one_piece() -> None:
    tensor = torch.empty(100, device="meta")
    [(part,)] = pieces(tensor, values=10)
    assert part is tensor


def test_a_copy_in_float64_is_bounded_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmtrain.pieces.GPU_COPY_VALUES", 40)
    assert len(exact_norms(torch.empty(100, device="meta"))) == 3


def test_norms_are_summed_in_float64() -> None:
    """In float32, the squares of the small values would not change a sum of one."""
    values = torch.full((1001,), 1e-5)
    values[0] = 1.0
    [norm] = exact_norms(values)
    assert norm.dtype == torch.float64 and float(norm**2 - 1) == pytest.approx(1e-7, rel=1e-5)
