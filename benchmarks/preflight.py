"""Description of this machine: its versions, the speed of copies and matrix products, and the attention that torch uses.

    python benchmarks/preflight.py

Prints the GPU, driver, torch, CUDA, cuDNN, NCCL and power limit with measured rates, and the attention that torch chooses for
bf16. On Hopper, this should be cuDNN's; with an older cuDNN on LD_LIBRARY_PATH, torch silently chooses another one. `gpu_day.py`
records both, and also uses this script to prepare the tokens that later rows read.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

from loops import RECIPE, is_asked, on_gpu
from table import PACKAGES, ROOT, commit, parser

SQUARE, LAYER = (8192, 8192, 8192), (16384, 2048, 5632)
"""Rows, columns and inner size of the timed products: a large one, and one of the 1B model."""
SMALL = (512, 512, 512)
COPIED_BYTES = 2**32
TIMES = 20
HEADS, HEAD, LENGTH = 16, 128, 4096
QUERY = "driver_version,power.limit,clocks.max.sm,clocks.sm,temperature.gpu,memory.total"


def machine(quick: bool) -> dict[str, Any]:
    """Return this machine's hardware, software and measured rates. With `quick`, matrices and copies are small."""
    import importlib.metadata

    import torch

    found = {
        "commit": commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
    }
    if on_gpu():
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "gpus": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "nvidia_smi": _nvidia_smi(),
            "alloc_conf": os.environ.get("PYTORCH_ALLOC_CONF"),
        }
    shapes = (SMALL, SMALL) if quick else (SQUARE, LAYER)
    found["gemm_tflops"] = [_product_rate(shape) for shape in shapes]
    return found | _copy_rates(COPIED_BYTES // 256 if quick else COPIED_BYTES)


def _nvidia_smi() -> str:
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no nvidia-smi: {error}"


def _device() -> str:
    return "cuda" if on_gpu() else "cpu"


def _seconds(work: Callable[[], object], times: int = TIMES) -> float:
    """Return the median seconds of `times` calls, after three calls that do not count."""
    import torch

    taken = []
    for _ in range(times + 3):
        began = time.perf_counter()
        work()
        if on_gpu():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[3:])


def _product_rate(shape: tuple[int, int, int]) -> float:
    """Return the TFLOP/s of one bf16 matrix product of random numbers, because constants would be faster."""
    import torch

    rows, columns, inner = shape
    a = torch.randn(rows, inner, device=_device(), dtype=torch.bfloat16)
    b = torch.randn(inner, columns, device=_device(), dtype=torch.bfloat16)
    out = torch.empty(rows, columns, device=_device(), dtype=torch.bfloat16)
    return float(f"{2e-12 * rows * columns * inner / _seconds(lambda: torch.mm(a, b, out=out)):.3g}")


def _copy_rates(size: int) -> dict[str, float]:
    """Return the GB/s of copies within memory (bytes read plus bytes written) and between a GPU and pinned memory."""
    import torch

    source = torch.empty(size, dtype=torch.uint8, device=_device())
    target = torch.empty_like(source)
    rates = {"copy_gb_per_s": 2e-9 * size / _seconds(lambda: target.copy_(source))}
    if on_gpu():
        pinned = torch.empty(size // 4, dtype=torch.uint8, pin_memory=True)
        part = source[: pinned.numel()]
        gigabytes = 1e-9 * pinned.numel()
        rates["to_gpu_gb_per_s"] = gigabytes / _seconds(lambda: part.copy_(pinned, non_blocking=True))
        rates["from_gpu_gb_per_s"] = gigabytes / _seconds(lambda: pinned.copy_(part, non_blocking=True))
    return {name: round(rate, 1) for name, rate in rates.items()}


def attention(quick: bool) -> dict[str, Any]:
    """Return the operations that causal bf16 attention of 4096 tokens runs, and its TFLOP/s forward and backward."""
    import torch
    import torch.nn.functional as F
    from torch.profiler import ProfilerActivity, profile

    length = 256 if quick else LENGTH
    shape = (1 if quick else 4, HEADS, length, HEAD)
    q, k, v = (torch.randn(shape, device=_device(), dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def once() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True).sum(), (q, k, v))

    once()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        once()
    names = sorted(event.key for event in profiled.key_averages() if event.key.startswith("aten::_scaled_dot_product"))
    flops = 3.5 * 4 * shape[0] * HEADS * length**2 * HEAD / 2  # forward once, backward 2.5 times; half is masked
    return {"operations": names, "tflops": float(f"{1e-12 * flops / _seconds(once):.3g}")}


def tokens(overrides: list[str]) -> dict[str, Any]:
    """Prepare the tokens that later rows read, and return their number."""
    from llmtrain.recipe_loader import load_recipe
    from llmtrain.train.prepare_data import prepare_texts

    prepared = prepare_texts(load_recipe(ROOT / RECIPE, overrides), show_progress=False)[""]
    return {"tokens": len(prepared.tokens("train")), "vocabulary": prepared.vocab_size}


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Return what the task asks for: the machine, its attention, or prepared tokens."""
    if task["what"] == "machine":
        return machine(task["quick"])
    return attention(task["quick"]) if task["what"] == "attention" else tokens(task["override"])


def main() -> None:
    """Measure the machine and its attention, and print the results."""
    parser(__doc__).parse_args()
    for name, value in (machine(not on_gpu()) | attention(not on_gpu())).items():
        print(f"{name}: {value}")


if __name__ == "__main__" and not is_asked(measure):
    main()
