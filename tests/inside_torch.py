"""Private parts of torch that tests need: a kernel that takes time, the search for races between streams, counts of
torch.compile, caches that keep process groups, and the CPU's fused attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def occupy_stream(cycles: int) -> None:
    """Keep the current stream busy for that many clock cycles of the GPU. The host goes on."""
    torch.cuda._sleep(cycles)


def forget_shardings() -> None:
    """Empty DTensor's caches. They keep meshes and thus process groups, each of which has a thread that wakes up 100
    times per second."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def watch_streams() -> None:
    """Make this process raise CUDASanitizerErrors at data races between streams from now on."""
    from torch.cuda._sanitizer import cuda_sanitizer

    if not cuda_sanitizer.enabled:
        cuda_sanitizer.enable()


@dataclass(frozen=True)
class Compilations:
    """Counts of torch.compile in this process since the last `forget_compilations`."""

    graphs: int
    """Number of compiled graphs, including recompiled ones."""
    breaks: dict[str, int]
    """Number of graph breaks, by their reason."""


def compilations() -> Compilations:
    """Return the counts so far."""
    from torch._dynamo.utils import counters

    return Compilations(counters["stats"]["unique_graphs"], dict(counters["graph_break"]))


def forget_compilations() -> None:
    """Drop all compiled code, and reset the counts."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()


def fuse_attention() -> None:
    """Make emulated GPUs use the CPU's fused attention from now on. torch takes them for devices without fused
    attention, and would keep the attention weights for the backward pass, which it does on no GPU."""

    def fused(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> torch.Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]

    torch.nn.functional.scaled_dot_product_attention = fused
