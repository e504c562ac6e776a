"""Properties of a GPU that the estimates of speed and memory assume."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from tests.distributed.pool import RankPool

pytestmark = pytest.mark.real_gpu


def attention_operations() -> tuple[tuple[int, int], list[str]]:
    """Return the GPU's compute capability, and the operations that causal attention of 4096 tokens in bf16 runs."""
    q = torch.randn(1, 16, 4096, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    names = [event.key for event in profiled.key_averages() if "_scaled_dot_product" in event.key]
    return torch.cuda.get_device_capability(), names


def test_hopper_uses_cudnns_attention(ranks: RankPool) -> None:
    """Another cuDNN that is found before torch's own, on LD_LIBRARY_PATH, silently leads to a slower attention."""
    [(capability, names)] = ranks.run(attention_operations, world_size=1)
    if capability != (9, 0):
        pytest.skip(f"capability {capability} is not Hopper's")
    assert any("cudnn" in name for name in names), names


def pinned_bytes() -> list[int]:
    """Return the bytes that pinning 3 MiB takes, according to each of torch's byte counters."""
    before = torch.cuda.host_memory_stats()
    kept = torch.empty(3 * 2**20, dtype=torch.uint8, pin_memory=True)
    after = torch.cuda.host_memory_stats()
    del kept
    return [after[key] - before.get(key, 0) for key in after if key.endswith("bytes.current")]


def test_pinned_memory_is_rounded_up_to_a_power_of_two(ranks: RankPool) -> None:
    [taken] = ranks.run(pinned_bytes, world_size=1)
    assert 4 * 2**20 in taken, taken
