"""What devices can do at most, for MFU: dense bf16 operations a second, from the vendors' data sheets."""

from __future__ import annotations

import os
import re
import resource

import torch

from llmtrain.parallel.mesh import local_device
from llmtrain.parallel.world import World

PEAK_BF16 = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10": 125e12,
}
"""Looked up in this order by words of the device's name: an A10G is no A10. Sparse figures, twice as high, are not used."""


def peak_flops(device: torch.device) -> float | None:
    """Operations a second of this device, or None for one whose peak is not known here."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_BF16.items() if re.search(rf"\b{part}\b", name)), None)


def memory_bytes(device: torch.device) -> int:
    """All memory of the GPU, or of the machine for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_of_rank(world: World) -> float:
    """Bytes that this rank may use: all of its GPU, or its part of the machine's memory. Raises RecipeError where there
    are fewer GPUs than ranks."""
    device = local_device(world)
    return memory_bytes(device) / (1 if device.type == "cuda" else world.local_size)


def enable_determinism(device: torch.device) -> None:
    """Let a GPU give the same bits for the same numbers, which some of its kernels otherwise don't; a CPU's all do."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this process has used: the device's allocator on a GPU, resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
