"""What this machine has: GPUs, cores, memory, shared memory, open files, room on its disks."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

import torch

from llmtrain.doctor.finding import Finding, ok, problem, warning
from llmtrain.parallel.world import World
from llmtrain.train.devices import memory_bytes

GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_MEMORY = GIB
LEAST_OPEN_FILES = 4096
LEAST_FREE_SHARE = 0.9
"""Of a GPU's memory; less means that somebody else computes on it."""


def machine(world: World) -> list[Finding]:
    """Devices, memory and limits, as this process sees them."""
    return [*gpus(world), cores_and_memory(), *shared_memory(SHARED_MEMORY, _gpu_count()), open_files()]


def gpus(world: World) -> list[Finding]:
    """A rank's own GPU, or all GPUs for a process by itself, with memory. Those that others use are warned of: so no rank
    asks after another's, since to ask takes some memory there."""
    there = range(_gpu_count())
    findings = []
    for index in there if world.size == 1 or len(there) == 1 else there[world.local_rank : world.local_rank + 1]:
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        what = f"GPU {index}: {properties.name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        if free < LEAST_FREE_SHARE * total:
            findings.append(warning(what, "another process holds its memory; see nvidia-smi"))
        else:
            findings.append(ok(what))
    return findings or [ok("no GPU: everything runs on the CPU, over gloo")]


def cores_and_memory() -> Finding:
    """CPU cores this process may use, and the machine's memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ok(f"{cores} CPU cores, {memory_bytes(torch.device('cpu')) / GIB:.1f} GiB of memory")


def shared_memory(folder: Path, gpu_count: int) -> list[Finding]:
    """Size of /dev/shm, over which NCCL connects the GPUs of a node that have no direct path."""
    if not folder.is_dir():
        return []
    size = shutil.disk_usage(folder).total
    what = f"{folder}: {size / GIB:.2f} GiB"
    if gpu_count > 1 and size < LEAST_SHARED_MEMORY:
        return [
            warning(
                f"{what}, little for NCCL between {gpu_count} GPUs",
                "give the container more: docker --shm-size, in Kubernetes a memory emptyDir (launch/kubernetes.yaml)",
            )
        ]
    return [ok(what)]


def open_files() -> Finding:
    """How many files and sockets a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    what = f"open files: at most {shown}"
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        most = "unlimited" if hard == resource.RLIM_INFINITY else hard
        return warning(
            f"{what}, few for many ranks", f"ulimit -n {LEAST_OPEN_FILES} or more (the hard limit is {most})"
        )
    return ok(what)


def disk(key: str, folder: str, needed: int | None) -> Finding:
    """Room below a folder of the recipe, which need not exist yet; `needed` bytes, None for unknown."""
    there = Path(folder).expanduser().absolute()
    while not there.exists():
        there = there.parent
    if not os.access(there, os.W_OK):
        return problem(f"{key}={folder} can't be written to ({there} is read-only for this user)", f"change {key}")
    free = shutil.disk_usage(there).free
    what = f"{key}={folder}: {free / GIB:.1f} GiB free"
    if needed is None:
        return ok(what)
    what += f", the run writes about {needed / GIB:.1f} GiB"
    if free < needed:
        return warning(what, f"free some room or change {key}; what is there from earlier runs is counted again")
    return ok(what)


def _gpu_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
