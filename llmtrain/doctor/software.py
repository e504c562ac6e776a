"""Versions of the software that a run uses, and the communication backends of this torch."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

import llmtrain
from llmtrain.doctor.finding import Finding, ok, problem, warning

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
        "llmtrain": f"{llmtrain.__version__} (source {_source_hash()})",
        "torch": torch.__version__,
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


def _source_hash() -> str:
    root = Path(llmtrain.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _cuda() -> Finding | None:
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"
        return ok(f"CUDA {torch.version.cuda}, NCCL {nccl}")
    if not NVIDIA_DRIVER.exists():
        return None
    if torch.version.cuda is None:
        return problem(
            "an NVIDIA driver is here, but this torch is built without CUDA",
            "install torch for CUDA: pip install torch -c constraints.txt from the default package index",
        )
    return warning(
        f"an NVIDIA driver is here, but CUDA {torch.version.cuda} finds no usable GPU",
        "look at nvidia-smi and CUDA_VISIBLE_DEVICES; the driver may be too old for this torch",
    )


def _backends() -> Finding:
    there = [
        name for name, is_there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if is_there
    ]
    if "gloo" not in there:
        return problem("torch.distributed has no gloo", "install a torch with gloo; the ranks agree over it")
    if torch.cuda.is_available() and "nccl" not in there:
        return problem("torch.distributed has no NCCL, which GPUs need", "install a torch for CUDA on Linux")
    return ok(f"backends: {', '.join(there)}")
