"""Rotary positions in two passes over queries and keys, forward and backward, instead of nine.

Written out, x cos + rotate_half(x) sin negates, joins and multiplies whole tensors, and backward fills and adds more of them.
Here each half is multiplied and added to in place; the gradient is the rotation back. A compiler makes one pass of the formula.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        return _turned(upstream, *ctx.saved_tensors, -1), None, None


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    turned = torch.empty_like(x)
    (a, b), (new_a, new_b) = x.chunk(2, dim=-1), turned.chunk(2, dim=-1)
    cos, sin = (table[..., : table.shape[-1] // 2] for table in (cos, sin))
    torch.mul(a, cos, out=new_a).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=new_b).addcmul_(a, sin, value=sign)
    return turned


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, H, T, e], each pair (x_i, x_{i + e/2}) turned by its angle (RoFormer, arXiv 2104.09864, equation 34, with the pairs
    of transformers' Llama). cos, sin [B or 1, 1, T, e]: two equal halves."""
    if torch.compiler.is_compiling():
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin
    return _Rotation.apply(x, cos, sin)
