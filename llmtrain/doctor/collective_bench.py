"""Benchmark of the mesh's collectives on both axes, with an estimate of the time per synchronization."""

from __future__ import annotations

import time

import torch
from rich.filesize import decimal

from llmtrain.doctor.finding import Finding, ok
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.mesh import Mesh

SMALLEST, LARGEST = 2**16, 2**24
"""fp32 values in the first and in the largest all-reduce: 256 KiB, 64 MiB."""
LONG_ENOUGH = 0.3
"""Seconds that an all-reduce must take for its rate to count; the largest one counts in any case."""


def bench_collectives(mesh: Mesh, bytes_a_round: float | None) -> list[Finding]:
    """Return findings from all-reduces over the replica axis and the shard axis. A collective of all ranks.

    `bytes_a_round` is the bytes that each rank sends per synchronization, or None if unknown. Raises TrainingError if a
    collective fails or takes longer than the mesh's timeout.
    """
    findings = []
    for comms, who in ((mesh.replica_comms, "between replicas"), (mesh.shard_comms, "inside a replica")):
        if comms.size == 1:
            findings.append(ok(f"{comms.axis} axis: one rank, nothing to send {who}"))
            continue
        seconds, sent = _all_reduce(comms, mesh)
        rate = sent / seconds
        findings.append(
            ok(
                f"{comms.axis} axis, {who}: all-reduce over {comms.size} ranks sends {decimal(int(sent))} from each in "
                f"{seconds:.3f} s, {decimal(int(rate))}/s"
            )
        )
        if comms is mesh.replica_comms and bytes_a_round is not None:
            findings.append(
                ok(
                    f"a synchronization of this model: {decimal(int(bytes_a_round))} from each rank, about "
                    f"{bytes_a_round / rate:.2g} s at that rate"
                )
            )
    return findings


def _all_reduce(comms: Comms, mesh: Mesh) -> tuple[float, float]:
    """Return (seconds of the slowest rank, bytes each rank sends) of the first all-reduce that counts."""
    values = SMALLEST
    _timed(comms, mesh, values)  # opens the connections
    while True:
        # The same on all ranks, and so is the decision to continue.
        seconds = _timed(comms, mesh, values)
        if seconds >= LONG_ENOUGH or values >= LARGEST:
            return seconds, 2 * (comms.size - 1) / comms.size * 4 * values
        values *= 2


def _timed(comms: Comms, mesh: Mesh, values: int) -> float:
    tensor = torch.zeros(values, device=comms.device)
    mesh.all_ranks.all_reduce(torch.zeros(1), "meeting before a measurement").wait()
    began = time.perf_counter()
    comms.all_reduce(tensor, "measuring").wait()
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    seconds = time.perf_counter() - began
    return float(mesh.all_ranks.all_gather(torch.tensor([seconds], dtype=torch.float64), "comparing times").max())
