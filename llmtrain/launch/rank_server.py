"""Rank server: a process that the launcher forks once everything is imported. The server forks the ranks, so torch,
transformers and the recipe's model are imported once per node instead of once per rank.

The process is multiprocessing's forkserver. It is forked before the launcher tokenizes text, meets other nodes or runs
torchrun's agent, because all of these start threads, and forking a process with threads can deadlock. Ranks on GPUs are
spawned by torchrun, because forking has not been tried with CUDA.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

import psutil

from llmtrain.stop_signals import STOP_SIGNALS, blocked_stop_signals

FORKED_RANK = Path(__file__).with_name("forked_rank.py")
SPAWNED = ("-m", "llmtrain", "train")
FORKED = ("--start-method", "forkserver", "--run-path", str(FORKED_RANK))


@contextmanager
def rank_server() -> Iterator[Sequence[str]]:
    """Run the server and kill it on exit. Yields the arguments that tell torchrun how to start a rank; RECIPE and overrides
    follow them. Where forking is not safe, no server runs and torchrun spawns the ranks. Usable once per process."""
    if not _can_fork():
        yield SPAWNED
        return
    resource_tracker.ensure_running()  # within the patch below, the tracker would be forked, too
    before = set(psutil.Process().children())
    with patch("multiprocessing.util.spawnv_passfds", _fork):
        multiprocessing.set_forkserver_preload([])
        forkserver.ensure_running()
    [server] = set(psutil.Process().children()) - before
    try:
        yield FORKED
    finally:
        server.kill()
        server.wait()


def _can_fork() -> bool:
    """Return whether this process has neither a GPU nor a second thread, and can create what the server needs: a semaphore, for
    which /dev/shm must be writable, and a socket in the temporary folder, whose path must be short. False where Linux's /proc is
    missing."""
    import torch

    threads = Path("/proc/self/task")
    if torch.cuda.is_available() or not threads.is_dir() or len(list(threads.iterdir())) > 1:
        return False
    try:
        multiprocessing.get_context("fork").Lock()  # as torchrun's, but gone at once
        connection.Listener(family="AF_UNIX").close()
    except OSError:
        return False
    return True


def _fork(interpreter: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Start `arguments`, which are `python ... -c PROGRAM`, in a fork of this process instead of a new interpreter. Return
    the process id. The fork keeps only `descriptors` and the standard streams open, as `spawnv_passfds` does."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else each rank would write the buffered output again
    gc.freeze()  # a collection in a rank then copies no page that it shares with the other ranks
    with blocked_stop_signals():
        if not (process := os.fork()):
            for number in STOP_SIGNALS:  # ranks and the launcher handle them; the server must outlive the ranks
                signal.signal(number, signal.SIG_IGN)
    if not process:
        _become(arguments[-1], descriptors)
    return process


def _become(program: str, descriptors: Sequence[int]) -> NoReturn:
    """Run `program` in this fork, which never returns to the launcher's code."""
    try:
        for number in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, *descriptors}:
            with suppress(OSError):  # the listing's own descriptor, already closed
                os.close(number)
        exec(program, {})
    finally:  # SystemExit, once the launcher and the ranks are gone
        os._exit(0)
