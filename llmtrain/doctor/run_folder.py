"""Check that all hosts share the run directory, as a run on several hosts requires. A run checks this only after its text is
prepared."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmtrain.doctor.finding import Finding, ok, problem
from llmtrain.files import nearest_existing
from llmtrain.train.shared_folder import ADVICE, PATIENCE_SECONDS, probe_file, sharing_problem, wait_for_file


def shared_run_folder(
    out_dir: str, rank: int, leaders: Sequence[int], gather: Callable[[str, Any], list[Any]], timeout_seconds: float
) -> list[Finding]:
    """Return a finding on whether the hosts, whose first ranks are `leaders`, share `run.out_dir`, or the nearest folder above it that
    exists. There is no finding if rank 0 can't write there. `gather(name, value)` returns every rank's value, and fails after
    `timeout_seconds`. A collective of all ranks."""
    folder = nearest_existing(Path(os.path.expanduser(out_dir)).absolute())
    probe = probe_file(folder)
    if rank == 0:
        with suppress(OSError):  # another finding reports it
            probe.touch()
    try:
        name = gather("file in the run directory", probe.name if rank == 0 and probe.exists() else None)[0]
        if name is None:
            return []
        is_there = rank in leaders and wait_for_file(folder / name, min(PATIENCE_SECONDS, timeout_seconds / 2))
        told = gather("view of the run directory", [socket.gethostname(), str(folder), is_there])
    finally:
        if rank == 0:
            with suppress(OSError):
                probe.unlink(missing_ok=True)
    if what := sharing_problem([told[leader] for leader in leaders]):
        return [problem(what, ADVICE)]
    return [ok(f"run.out_dir={out_dir} is the same folder on all {len(leaders)} hosts")]
