"""Environment variables that configure the launchers and the communication libraries."""

from __future__ import annotations

import os
from collections.abc import Mapping

from llmtrain.doctor.finding import Finding, ok, warning

PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCH_ELASTIC_", "TORCH_DISTRIBUTED_")
NAMES = (
    *("MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "NPROC_PER_NODE", "RANK", "WORLD_SIZE"),
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF"),
    *("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_PROCID"),
)
SLOW = {
    "NCCL_DEBUG": ("TRACE",),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "CUDA_LAUNCH_BLOCKING": ("1",),
}
"""Debugging values that slow training down."""


def environment(variables: Mapping[str, str] = os.environ) -> list[Finding]:
    """Return one finding that lists the relevant variables, and a warning for each value that slows training down."""
    told = {k: v for k, v in sorted(variables.items()) if k.startswith(PREFIXES) or k in NAMES or k in SLOW}
    listed = " ".join(f"{name}={value}" for name, value in told.items())
    findings = [ok(f"environment: {listed or 'no variable of NCCL, gloo, torchrun or Slurm is set'}")]
    for name, values in SLOW.items():
        if variables.get(name, "").upper() in values:
            findings.append(warning(f"{name}={variables[name]} makes training slow", f"unset {name}"))
    return findings
