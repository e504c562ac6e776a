"""What is started on several hosts, and what came of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from llmtrain.compare.cluster import Host, why_no_cluster
from tests.end_to_end.runs import ROOT, Runs, environment, exact

needs_hosts = pytest.mark.skipif((reason := why_no_cluster()) is not None, reason=reason or "")
SHORT = ["train.steps=6", "sync.warmup_steps=1", "checkpoint.every=null", "eval.every=null", "log.every=1"]
"""One synchronous step, one round of four, and one more."""
PORT = "29511"


def arguments(runs: Runs, name: str, *overrides: str) -> list[str]:
    """RECIPE and overrides of a short run."""
    return runs.command(name, *SHORT, *overrides)[2:]


def start(host: Host, command: Sequence[str], **variables: str) -> subprocess.Popen:
    """A command in the repository, its output to be read."""
    env = {name: value for name, value in environment().items() if not name.startswith(("MASTER_", "GLOO_"))}
    return host.popen(
        command,
        env={**env, "HF_HUB_OFFLINE": "1", **variables},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_rank(host: Host, rank: int, size: int, master: str, command: Sequence[str]) -> subprocess.Popen:
    """`python -m COMMAND` as one rank, alone on its host, by the variables that every launcher sets."""
    ranks = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    variables = {name: str(value) for name, value in ranks.items()}
    return start(host, [sys.executable, "-m", *command], MASTER_ADDR=master, MASTER_PORT=PORT, **variables)


def ends(processes: Sequence[subprocess.Popen], seconds: float) -> list[tuple[int, str]]:
    """(exit code, output) of each, all within `seconds`; what is still there then is ended, and the test fails."""
    deadline = time.monotonic() + seconds
    ended = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            ended.append((process.returncode, output))
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return ended


def errors(output: str) -> list[str]:
    """The lines that the program ended with."""
    return [line for line in output.splitlines() if line.startswith("error: ")]


def measured(runs: Runs, name: str) -> list[dict]:
    """What a run logged, as far as it must be the same wherever its ranks were."""
    return [exact(line) for line in runs.lines(name)]
