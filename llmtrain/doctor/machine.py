"""Checks of this machine: GPUs, cores, memory, shared memory, open files and disk space."""

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
"""Minimum free fraction of a GPU's memory; less means that another process uses the GPU."""


def machine(world: World) -> list[Finding]:
    """Return findings on devices, memory and limits, as this process sees them."""
    return [*gpus(world), cores_and_memory(), *shared_memory(SHARED_MEMORY, _gpu_count()), open_files()]


def gpus(world: World) -> list[Finding]:
    """Return a finding on this rank's GPU, or on each GPU if this is the only process.

    A GPU that another process uses gives a warning. A rank queries no other rank's GPU, because the query itself
    takes some memory there.
    """
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
    """Return a finding on the CPU cores this process may use, and the machine's memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ok(f"{cores} CPU cores, {memory_bytes(torch.device('cpu')) / GIB:.1f} GiB of memory")


def shared_memory(folder: Path, gpu_count: int) -> list[Finding]:
    """Return a finding on the size of /dev/shm, through which NCCL connects GPUs of a node that have no direct path.

    A small one is a warning if there are several GPUs.
    """
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
    """Return a finding on the limit of open files and sockets per process; a low limit is a warning."""
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
    """Return a finding on the free space for a recipe's `folder`, which need not exist yet.

    `needed` is what the run writes in bytes, or None if unknown. A read-only folder is a problem, and too little
    space a warning.
    """
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
