"""Checks of this machine: packages, environment variables, GPUs, cores, memory, open files, disk space and network
interfaces."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

import llmtrain
from llmtrain.consistency import source_hash
from llmtrain.doctor.finding import Finding, ok, problem, warning
from llmtrain.errors import TrainingError, one_line
from llmtrain.files import nearest_existing
from llmtrain.parallel.network import GLOO, NCCL, Networks, address_of, check_localhost, given_interface, is_loopback
from llmtrain.parallel.world import World, gpu_count
from llmtrain.process_limits import usable_cores
from llmtrain.quantities import GIB
from llmtrain.train.devices import memory_bytes

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_MEMORY = GIB
LEAST_OPEN_FILES = 4096
LEAST_FREE_SHARE = 0.9
"""Minimum free fraction of a GPU's memory. If less is free, another process probably uses the GPU."""


def machine(world: World) -> list[Finding]:
    """Return findings on devices, memory and limits, as this process sees them."""
    return [*gpus(world), cores_and_memory(), *shared_memory(SHARED_MEMORY, gpu_count()), open_files()]


def gpus(world: World) -> list[Finding]:
    """Return a finding on this rank's GPU, or on each GPU if this is the only process.

    A GPU that another process uses gives a warning. A rank queries no other rank's GPU, because the query itself
    takes some memory there.
    """
    shown = range(gpu_count())
    if world.size > 1 and len(shown) > 1:
        shown = shown[world.local_rank : world.local_rank + 1]
    findings = []
    for index in shown:
        try:
            name = torch.cuda.get_device_properties(index).name
            free, total = torch.cuda.mem_get_info(index)
        except (RuntimeError, AssertionError) as error:  # the latter if CUDA finds fewer devices than the driver (MIG)
            findings.append(problem(f"GPU {index} can't be used: {one_line(error)}", "see nvidia-smi"))
            continue
        what = f"GPU {index}: {name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        if free < LEAST_FREE_SHARE * total:
            findings.append(warning(what, "another process uses its memory; see nvidia-smi"))
        else:
            findings.append(ok(what))
    return findings or [ok("no GPU: everything runs on the CPU, over gloo")]


def cores_and_memory() -> Finding:
    """Return a finding on the CPU cores and the memory that this process may use."""
    return ok(f"{usable_cores()} CPU cores, {memory_bytes(torch.device('cpu')) / GIB:.1f} GiB of memory")


def shared_memory(folder: Path, gpu_count: int) -> list[Finding]:
    """Return a finding on /dev/shm. Through this folder, NCCL connects GPUs of a node that have no direct path, and processes share
    semaphores.

    A folder that is missing or can't be written is a warning; a small one is a warning if there are several GPUs.
    """
    if not os.access(folder, os.W_OK):
        return [
            warning(
                f"{folder} is missing or can't be written, so several processes can't tokenize, and each rank imports torch itself",
                "mount a tmpfs there, or set data.num_proc=1",
            )
        ]
    size = shutil.disk_usage(folder).total
    what = f"{folder}: {size / GIB:.2f} GiB"
    if gpu_count > 1 and size < LEAST_SHARED_MEMORY:
        return [
            warning(
                f"{what}, which is small for NCCL between {gpu_count} GPUs",
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
            f"{what}, which is low for many ranks", f"ulimit -n {LEAST_OPEN_FILES} or more (the hard limit is {most})"
        )
    return ok(what)


def disk(key: str, folder: str, needed: int | None, use: str = "the run writes about", advice: str = "") -> Finding:
    """Return a finding on the free space for a recipe's `folder`, which need not exist yet.

    `needed` is the number of free bytes that the folder must have, or None if unknown, and `use` tells what they are for. A
    read-only folder and a file in its place are problems, and too little space is a warning that ends with `advice`.
    """
    there = nearest_existing(Path(os.path.expanduser(folder)).absolute())
    if not there.is_dir():
        return problem(f"{key}={folder} can't be a folder ({there} is a file)", f"change {key}")
    if not os.access(there, os.W_OK | os.X_OK):
        return problem(f"{key}={folder} can't be written to ({there} is read-only for this user)", f"change {key}")
    free = shutil.disk_usage(there).free
    what = f"{key}={folder}: {free / GIB:.1f} GiB free"
    if needed is None:
        return ok(what)
    what += f", {use} {needed / GIB:.1f} GiB"
    if free < needed:
        return warning(what, f"free some room or change {key}{advice}")
    return ok(what)


PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCH_ELASTIC_", "TORCH_DISTRIBUTED_")
NAMES = (
    "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "NPROC_PER_NODE", "RANK", "WORLD_SIZE",
    "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF",
    "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_PROCID",
)  # fmt: skip
"""Environment variables that the report lists, besides those that begin with PREFIXES and those in SLOW."""
SLOW = {
    "NCCL_DEBUG": ("TRACE",),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("1",),  # all streams share a queue, so messages and computation hardly overlap
}
"""Values of environment variables that slow training down; most are meant for debugging."""


def environment() -> list[Finding]:
    """Return one finding that lists the relevant variables, and a warning for each value that slows training down."""
    relevant = {k: v for k, v in sorted(os.environ.items()) if k.startswith(PREFIXES) or k in NAMES or k in SLOW}
    listed = " ".join(f"{name}={value}" for name, value in relevant.items())
    findings = [ok(f"environment: {listed or 'no variable of NCCL, gloo, torchrun or Slurm is set'}")]
    for name, values in SLOW.items():
        if os.environ.get(name, "").upper() in values:
            findings.append(warning(f"{name}={os.environ[name]} makes training slow", f"unset {name}"))
    return findings


NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def software() -> list[Finding]:
    """Return findings on the versions and backends of this process."""
    versions = [f"python {platform.python_version()}", f"torch {torch.__version__}"]
    versions += [f"{name} {found}" for name in ("transformers", "deepspeed") if (found := installed_version(name))]
    findings = [ok(f"llmtrain {llmtrain.__version__}, " + ", ".join(versions)), _cuda(), _backends()]
    return [finding for finding in findings if finding is not None]


def identity() -> dict[str, str]:
    """Return the software versions that are compared between ranks."""
    return {
        "llmtrain": f"{llmtrain.__version__} (source {source_hash()})",
        "torch": torch.__version__.partition("+")[0],  # as a run compares it
        "transformers": installed_version("transformers") or "none",
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def installed_version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed.

    The package is not imported, because importing some packages takes seconds.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cuda() -> Finding | None:
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"
        return ok(f"CUDA {torch.version.cuda}, NCCL {nccl}")
    if not NVIDIA_DRIVER.exists():
        return None
    if torch.version.cuda is None:
        return problem(
            "an NVIDIA driver is installed, but this torch is built without CUDA",
            "install torch for CUDA: pip install torch -c constraints.txt from the default package index",
        )
    return warning(
        f"an NVIDIA driver is installed, but CUDA {torch.version.cuda} finds no usable GPU",
        "look at nvidia-smi and CUDA_VISIBLE_DEVICES; the driver may be too old for this torch",
    )


def _backends() -> Finding:
    available = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    if not available["gloo"]:
        return problem(
            "torch.distributed has no gloo",
            "install a build of torch with gloo, over which ranks coordinate",
        )
    if torch.cuda.is_available() and not available["nccl"]:
        return problem("torch.distributed has no NCCL, which GPUs need", "install a build of torch for CUDA on Linux")
    return ok(f"backends: {', '.join(name for name, is_available in available.items() if is_available)}")


@dataclass(frozen=True)
class Card:
    """A network interface as reported by the kernel."""

    name: str
    address: str | None
    """IPv4 address; None if the interface has none."""
    is_up: bool
    mbit: int
    """Speed in Mbit/s; 0 if the kernel does not report it, as for virtual cards."""


UNKNOWN = "?"
"""Placeholder for an unknown interface name."""


def network_cards() -> list[Card]:
    """Return all network interfaces of this host, including loopback."""
    return [Card(name, address_of(name), one.isup, one.speed) for name, one in psutil.net_if_stats().items()]


def localhost() -> list[Finding]:
    """Return a problem if the name localhost, through which ranks of one machine meet, does not resolve to a loopback address."""
    try:
        check_localhost()
    except TrainingError as error:
        what, _, advice = str(error).partition("; ")
        return [problem(what, advice)]
    return []


def network_interfaces(cards: Sequence[Card]) -> list[Finding]:
    """Return one finding that lists all interfaces that are up or have an address, and problems if GLOO_SOCKET_IFNAME
    or NCCL_SOCKET_IFNAME selects no interface with an address."""
    shown = []
    for card in cards:
        if card.address is None and not card.is_up:
            continue
        speed = f", {card.mbit / 1000:g} Gbit/s" if card.mbit else ""
        state = "" if card.is_up else ", down"
        shown.append(f"{card.name} ({card.address or 'no IPv4 address'}{speed}{state})")
    findings = [ok("interfaces: " + ", ".join(shown))]
    names = {card.name for card in cards if card.address}
    advice = f"name one of: {', '.join(sorted(names))}"
    gloo, nccl = os.environ.get(GLOO), os.environ.get(NCCL)
    if gloo and not names & set(map(str.strip, gloo.split(","))):
        findings.append(problem(f"{GLOO}={gloo}, but this host has no such interface with an address", advice))
    if nccl and not _matches_nccl(nccl, names):
        findings.append(problem(f"{NCCL}={nccl} matches no interface of this host that has an address", advice))
    return findings


def axis_interfaces(networks: Networks) -> list[Finding]:
    """Return a finding on the interface of each axis in a run on several nodes.

    Loopback is a problem, because it reaches no other node.
    """
    findings = []
    for axis, name in (("replica", networks.replica), ("shard", networks.shard)):
        name = name or given_interface()
        address = name and address_of(name)
        if not address:
            findings.append(ok(f"{axis} axis: the backend chooses the interface"))
        elif is_loopback(address):
            findings.append(
                problem(
                    f"{axis} axis over {name} ({address}), which leads to no other host",
                    f"set parallel.{axis}_network (or {GLOO}) to the interface that does",
                )
            )
        else:
            findings.append(ok(f"{axis} axis over {name} ({address})"))
    return findings


def replica_interface(networks: Networks, towards_rank_0: str | None) -> tuple[str, str]:
    """Return (interface, address) for traffic between replicas.

    If no interface with an address is known, they are UNKNOWN and the address toward rank 0 (or 127.0.0.1).
    """
    name = networks.replica or given_interface()
    address = name and address_of(name)
    if name and address:
        return name, address
    return UNKNOWN, towards_rank_0 or "127.0.0.1"


def _matches_nccl(given: str, names: set[str]) -> bool:
    """Return whether NCCL's rule selects any of `names`.

    `given` lists prefixes. A leading `=` makes them full names; a leading `^` selects all interfaces but these.
    """
    excluded, whole = given.startswith("^"), given.lstrip("^").startswith("=")
    wanted = tuple(given.lstrip("^=").split(","))
    return any((name in wanted if whole else name.startswith(wanted)) != excluded for name in names)
