"""Emulated names of `torch.cuda`, for a process that has not imported torch yet."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.emulated_gpu.build import HERE, HOOKS, MODULE
from tests.emulated_gpu.streams import HostClock, names_of_streams

ROOT = HERE.parents[1]
GIB = 2**30
FOLDER, COUNT = "EMULATED_GPU", "EMULATED_GPU_COUNT"
"""Environment variables: the folder of the libraries, and the number of GPUs, by default that of local ranks."""


def environment(folder: Path) -> dict[str, str]:
    """Return the environment variables that give a Python process GPUs."""
    return {FOLDER: str(folder), "PYTHONPATH": f"{HERE / 'path'}{os.pathsep}{ROOT}"}


def install() -> None:
    """Give this process GPUs from here on."""
    folder = Path(os.environ[FOLDER])
    ctypes.CDLL(str(folder / HOOKS), ctypes.RTLD_GLOBAL)
    import torch

    spec = importlib.util.spec_from_file_location("emulated", folder / MODULE)
    emulated = sys.modules["emulated"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(emulated)
    _name_devices(torch, emulated)
    _name_streams(torch, emulated)
    _name_storage(torch, emulated)
    _name_groups(torch, emulated)


def loaded() -> Any:
    """Return the compiled module, in a process with GPUs."""
    return sys.modules["emulated"]


# ---- devices


def _name_devices(torch: Any, emulated: Any) -> None:
    def index(device: Any = None) -> int:
        if device is None or isinstance(device, int):
            return emulated.current_device() if device is None else device
        found = torch.device(device).index
        return emulated.current_device() if found is None else found

    class Device:
        def __init__(self, device: Any):
            self.index = index(device)

        def __enter__(self) -> None:
            self.before = emulated.current_device()
            emulated.set_device(self.index)

        def __exit__(self, *_: object) -> None:
            emulated.set_device(self.before)

    properties = SimpleNamespace(name="NVIDIA H100", total_memory=80 * GIB, major=9, minor=0, multi_processor_count=132)
    _take_over(
        torch.cuda,
        is_available=lambda: True,
        is_initialized=lambda: True,
        init=_nothing(),
        _lazy_init=_nothing(),
        device_count=lambda: int(os.environ.get(COUNT) or os.environ.get("LOCAL_WORLD_SIZE", 4)),
        current_device=lambda: emulated.current_device(),
        set_device=lambda device: emulated.set_device(index(device)),
        device=Device,
        get_device_name=lambda device=None: properties.name,
        get_device_properties=lambda device=None: properties,
        get_device_capability=lambda device=None: (properties.major, properties.minor),
        mem_get_info=lambda device=None: (79 * GIB, properties.total_memory),
        memory_allocated=lambda device=None: emulated.allocated(),
        max_memory_allocated=lambda device=None: emulated.peak(),
        reset_peak_memory_stats=lambda device=None: emulated.forget_peak(),
        empty_cache=_nothing(),
        is_bf16_supported=lambda including_emulation=True: True,
        get_rng_state=lambda device="cuda": torch.get_rng_state(),
        set_rng_state=lambda state, device="cuda": None,  # the state is the CPU's, which callers set as such
        manual_seed=_nothing(),
        manual_seed_all=_nothing(),
        set_sync_debug_mode=_nothing(),
        max_memory_reserved=lambda device=None: emulated.peak(),
    )
    _take_over(torch.cuda.nccl, version=lambda: (2, 0, 0))
    _take_over(torch.cuda.nvtx, range_push=_nothing(), range_pop=_nothing())
    _take_over(
        torch.accelerator,
        current_accelerator=lambda check_available=False: torch.device("cuda"),
        is_available=lambda: True,
        device_count=lambda: torch.cuda.device_count(),
        current_device_index=lambda: emulated.current_device(),
    )
    # The default backend compiles for GPUs, and needs one.
    compile_module, compile_function = torch.nn.Module.compile, torch.compile
    torch.nn.Module.compile = lambda self, **options: compile_module(self, **{**options, "backend": "aot_eager"})
    torch.compile = lambda *given, **options: compile_function(*given, **{**options, "backend": "aot_eager"})


# ---- streams


def _name_streams(torch: Any, emulated: Any) -> None:
    names = names_of_streams(lambda: torch.device("cuda", emulated.current_device()), HostClock())
    _take_over(torch.cuda, **names)
    current, wait_for_all = names["current_stream"], names["synchronize"]
    _take_over(
        torch.accelerator, current_stream=lambda device=None: current(), synchronize=lambda device=None: wait_for_all()
    )
    torch.Event = names["Event"]
    torch.Tensor.record_stream = _nothing()


# ---- storages, whose methods are no operations of the dispatcher


def _name_storage(torch: Any, emulated: Any) -> None:
    resize, clone, to = torch.UntypedStorage.resize_, torch.UntypedStorage.clone, torch.UntypedStorage.to

    def values(storage: Any) -> Any:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def resize_(self: Any, size: int) -> Any:
        return emulated.resize_storage(values(self), size) if self.device.type == "cuda" else resize(self, size)

    def cloned(self: Any) -> Any:
        return values(self).clone().untyped_storage() if self.device.type == "cuda" else clone(self)

    def moved(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        if torch.device(device).type != "cuda":
            return to(self, device=device, non_blocking=non_blocking)
        return values(self).to(device, copy=True).untyped_storage()

    _take_over(torch.UntypedStorage, resize_=resize_, clone=cloned, to=moved)


# ---- process groups


def _name_groups(torch: Any, emulated: Any) -> None:
    c10d = torch.distributed.distributed_c10d
    gloo = torch.distributed.ProcessGroupGloo

    class OneOfOurs(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, emulated.Group)

        def __call__(cls, store: Any, rank: int, size: int, options: Any = None, timeout: Any = None) -> Any:
            inner = gloo(store, rank, size, timeout or options._timeout)
            group = emulated.Group(inner, cls.backend)
            group.options = inner.options
            return group

    class Gloo(metaclass=OneOfOurs):
        backend = "gloo"

    class Nccl(metaclass=OneOfOurs):
        backend = "nccl"

        class Options(SimpleNamespace):
            is_high_priority_stream = False

    c10d.ProcessGroupGloo, c10d.ProcessGroupNCCL = Gloo, Nccl
    torch.distributed.is_nccl_available = c10d.is_nccl_available = lambda: True


def _take_over(where: Any, **names: Any) -> None:
    for name, value in names.items():
        setattr(where, name, value)


def _nothing() -> Callable[..., None]:
    """Return a new function without effect, because torch.compile tells names apart by their functions."""
    return lambda *_, **__: None
