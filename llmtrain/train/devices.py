"""Device of a rank: its peak speed and memory, determinism, allocators, profiles, pauses for garbage collection, and a report
when memory runs out."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import profile, schedule

from llmtrain.config import ProfileSection
from llmtrain.errors import TrainingError, first_line
from llmtrain.parallel.mesh import local_device
from llmtrain.parallel.world import World, ranks_per_device
from llmtrain.plan.cards import card_of
from llmtrain.process_limits import usable_memory

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
"""Parameters of glibc's mallopt (malloc.h)."""
ALLOCATOR = "PYTORCH_ALLOC_CONF"
ALLOCATOR_VARIABLES = (ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables with which a user configures torch's allocator, including old names."""
AfterStep = Callable[[int], None]
"""Function called after each step with the number of the step."""


def peak_flops(device: torch.device) -> float | None:
    """Return the device's peak FLOP/s, or None if it is not known, as for CPUs."""
    if device.type != "cuda":
        return None
    card = card_of(torch.cuda.get_device_name(device))
    return None if card is None else card.peak_flops


def memory_bytes(device: torch.device) -> int:
    """Return the total memory in bytes: of the GPU or, for a CPU, the memory that this process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return usable_memory()


def memory_of_rank(world: World) -> float:
    """Return the bytes of memory that this rank may use: its share of its GPU's or the host's memory. Raises
    RecipeError if there are fewer GPUs than ranks, unless ranks may share GPUs."""
    return memory_bytes(local_device(world)) / ranks_per_device(world)


def enable_determinism(device: torch.device) -> None:
    """Make GPU kernels deterministic; CPU kernels already are. Call before the process's first matrix product, at which torch
    reads the configuration of cuBLAS."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads memory before writing to it


def avoid_cudnn_attention(device: torch.device) -> None:
    """Exclude cuDNN, torch's first choice on Hopper, from the kernels that torch may choose for attention.

    With a mask, cuDNN's backward pass may return NaN in torch 2.11 to 2.13 (pytorch issue 196678), and cuDNN repeats
    its setup for every new shape of its inputs.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next allocation, unless the environment configures it (MALLOC_...).

    Otherwise every large tensor on a CPU gets new pages from the kernel, and gives them back when it is freed. In
    measurements, the first write to these pages took longer than most operations on the tensor.
    """
    if (libc := _configurable_libc()) is not None:
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def share_freed_memory() -> None:
    """Make glibc let the threads of this process reuse each other's freed memory, unless the environment configures it
    (MALLOC_...). Call before the threads start.

    Otherwise each thread keeps what it frees. Replicas that take turns would then need memory for the activations of all
    of them, although only one replica has activations at a time.
    """
    if (libc := _configurable_libc()) is not None:
        libc.mallopt(M_ARENA_MAX, 1)


def _configurable_libc() -> ctypes.CDLL | None:
    """Return glibc, whose `mallopt` sets parameters of malloc; None without glibc, or if the environment sets the
    parameters (MALLOC_...)."""
    libc = ctypes.CDLL(None)
    is_configured = any(name.startswith("MALLOC_") for name in os.environ)
    return libc if hasattr(libc, "mallopt") and not is_configured else None


def use_expandable_segments() -> None:
    """Let torch's allocator grow its segments on GPUs, for this process and those that it starts, unless the user has
    configured the allocator. Call before the first use of a GPU.

    Otherwise blocks that are gathered and freed alternately leave gaps in memory into which no later block fits.
    """
    if torch.cuda.is_available() and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR] = "expandable_segments:True"


def peak_memory_bytes(device: torch.device) -> int:
    """Return this process's peak memory in bytes: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reserved_memory_bytes(device: torch.device) -> int:
    """Return the most bytes that torch's allocator has taken from a GPU, including what it keeps for reuse; 0 on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


@contextmanager
def collect_garbage_every(steps: int | None) -> Iterator[AfterStep]:
    """Collect garbage, within this context, after every step that is a multiple of `steps`, instead of whenever Python decides to. If
    `steps` is None, leave garbage collection to Python. Yields the function to call after each step.

    Python collects after a certain number of allocations. Ranks reach it at different steps, so all ranks would wait
    for each rank's pause.
    """
    if steps is None or not gc.isenabled():
        yield lambda step: None
        return

    def after_step(step: int) -> None:
        if step % steps == 0:
            gc.collect()

    gc.disable()
    try:
        yield after_step
    finally:
        gc.enable()


@contextmanager
def profile_steps(
    section: ProfileSection | None, rank: int, folder: Path, note: Callable[[str], None]
) -> Iterator[AfterStep]:
    """Profile the steps of `section` with torch.profiler, and write them to `folder` as a Chrome trace of this rank.
    Yields the function to call after each step.

    The step before the first one warms up the profiler. A run that resumes within these steps warms up again and records
    the remaining ones. A trace that cannot be written is reported through `note`, and training continues.
    """
    if section is None or rank not in section.ranks:
        yield lambda step: None
        return
    profiler: profile | None = None

    def write(finished: profile) -> None:
        path = folder / f"rank-{rank:05}.json.gz"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            finished.export_chrome_trace(str(path))
            note(f"profile of steps {section.first} to {section.last}: {path} (open it in ui.perfetto.dev)")
        except (OSError, RuntimeError) as error:
            note(f"the profile could not be written to {path}: {error}")

    def after_step(step: int) -> None:
        nonlocal profiler
        if profiler is not None:
            profiler.step()
        elif section.first - 2 <= step < section.last - 1:
            plan = schedule(wait=0, warmup=1, active=section.last - step - 1, repeat=1)
            profiler = profile(schedule=plan, on_trace_ready=write)
            profiler.start()

    try:
        yield after_step
    finally:
        if profiler is not None:
            profiler.stop()


@contextmanager
def explain_out_of_memory(rank: int, device: torch.device, folder: Path) -> Iterator[None]:
    """Convert torch's out-of-memory errors, of the device and of the host's pinned memory, into one-line TrainingErrors. For the
    device, write to `folder` what was allocated: a summary, and a snapshot for https://pytorch.org/memory_viz."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = " ".join(str(error).split()).split(". ")
        path = folder / f"rank-{rank:05}.txt"
        with suppress(OSError):  # the disk may be full too
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(torch.cuda.memory_summary(device), encoding="utf-8")
            snapshot = {"segments": torch.cuda.memory_snapshot(), "device_traces": []}
            path.with_suffix(".pickle").write_bytes(pickle.dumps(snapshot))
        raise TrainingError(
            f"rank {rank} has no memory left on {device} ({'. '.join(said[:2])}); use a smaller train.micro_batch, "
            f"parallel.activation_checkpointing=true, sync.offload=true or more parallel.shards; what was allocated is in {path}"
        ) from error
    except torch.AcceleratorError as error:
        if "out of memory" not in str(error):
            raise
        raise TrainingError(
            f"rank {rank}: this host has no pinned memory left ({first_line(error)}); use sync.offload=false, "
            "checkpoint.background=false or more parallel.shards"
        ) from error
