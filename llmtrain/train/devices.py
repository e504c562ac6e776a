"""Device properties: peak dense bf16 FLOP/s from vendor data sheets (for MFU), memory, and determinism."""

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
"""Peak FLOP/s by device name. The first entry that matches whole words of the name applies, so an A10G is not an
A10. The figures for sparse matrices, which are twice as high, are not used."""


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak FLOP/s, or None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_BF16.items() if re.search(rf"\b{part}\b", name)), None)


def memory_bytes(device: torch.device) -> int:
    """Return the total memory in bytes: the GPU's, or the machine's for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_of_rank(world: World) -> float:
    """Return the bytes of memory that this rank may use: all of its GPU's, or its share of the machine's.
    Raises RecipeError if there are fewer GPUs than ranks."""
    device = local_device(world)
    return memory_bytes(device) / (1 if device.type == "cuda" else world.local_size)


def enable_determinism(device: torch.device) -> None:
    """Make GPU kernels deterministic. CPU kernels already are."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def peak_memory_bytes(device: torch.device) -> int:
    """Return this process's peak memory in bytes: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
