"""Rank server: one process imports torch and transformers and forks the ranks, so that they need not import them
again.

The process is multiprocessing's forkserver. It starts before torchrun's agent, because the agent has threads and
forking a process with threads can deadlock. Ranks on GPUs are spawned by torchrun, because forking has not been
tried with CUDA.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from unittest.mock import patch

import psutil

PRELOAD = "llmtrain.launch.preload"
FORKED_RANK = Path(__file__).with_name("forked_rank.py")
PROBE_SECONDS = 60.0
"""Maximum seconds to wait for the server's imports. After that, ranks are spawned instead."""


@contextmanager
def rank_server() -> Iterator[None]:
    """Run the server, which imports in the background, and kill it on exit. Usable once per process."""
    resource_tracker.ensure_running()
    before = set(psutil.Process().children())
    # Libraries that read this create their threads on import. A rank sets its own number (forked_rank).
    # pyarrow, which other libraries may import, has a variable of its own.
    with patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}):
        multiprocessing.set_forkserver_preload([PRELOAD])
        forkserver.ensure_running()
    [server] = set(psutil.Process().children()) - before
    try:
        yield
    finally:
        server.kill()
        server.wait()


def rank_program() -> list[str]:
    """Return torchrun's arguments that start a rank; RECIPE and overrides follow them. Without a GPU, waits for the
    server's imports."""
    return (
        ["--start-method", "forkserver", "--run-path", str(FORKED_RANK)] if _can_fork() else ["-m", "llmtrain", "train"]
    )


def _can_fork() -> bool:
    import torch

    if torch.cuda.is_available():
        return False
    probe = multiprocessing.get_context("forkserver").Process(target=_exit_by_safety_of_parent)
    probe.start()
    probe.join(PROBE_SECONDS)
    return probe.exitcode == 0


def _exit_by_safety_of_parent() -> None:
    threads = os.listdir(f"/proc/{os.getppid()}/task")
    sys.exit(0 if PRELOAD in sys.modules and len(threads) == 1 else 1)
