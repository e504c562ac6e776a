"""Helpers that start commands and ranks on several hosts, and collect their exit codes and outputs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from llmtrain.compare.cluster.hosts import NAMESPACES, Host, VirtualHost, why_no_cluster
from tests.end_to_end.runs import ROOT, Runs, environment, llmtrain_arguments
from tests.mother import Process, run_llmtrain, session

needs_hosts = pytest.mark.skipif((reason := why_no_cluster()) is not None, reason=reason or "")
SIX_STEPS = ["train.steps=6", "sync.warmup_steps=1", "checkpoint.every=null"]
"""Overrides for a synchronous step, a round of four steps and a round of one."""
PORT = "29511"
"""Port at which ranks meet. It is always free, because each virtual host has its own ports."""
NEW_MOUNTS, NEW_NAME = 0x00020000, 0x04000000
"""Flags of unshare(2)."""
PRIVATE, BIND = 0x00040000 | 0x00004000, 0x00001000
"""Flags of mount(2)."""


def arguments(runs: Runs, name: str, *overrides: str) -> list[str]:
    """Return RECIPE and overrides for a run."""
    return runs.command(name, *overrides)[2:]


def start(host: Host, command: Sequence[str], fresh: bool = False, **variables: str) -> Process | subprocess.Popen:
    """Start a command in the repository on a host, and capture its output. A command of llmtrain is forked from the
    mother, unless `fresh` is set."""
    words = None if fresh else llmtrain_arguments(command)
    if words is not None:
        return fork(host, run_llmtrain, *words, **variables)
    return host.popen(
        command,
        env=_variables(variables),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def fork(host: VirtualHost, fn: Callable[..., Any], *args: Any, **variables: str) -> Process:
    """Call a function in a forked process on a host, and capture its output."""
    place = (str(NAMESPACES / host.mark), str(host.names), host.name)
    return session().fork(call_inside, place, fn, args, environment=_variables(variables), capture=True)


def start_rank(host: VirtualHost, rank: int, size: int, master: str, fn: Callable[..., Any], *args: Any) -> Process:
    """Call a function as the only rank on a host, with the variables that every launcher sets."""
    ranks = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    variables = {name: str(value) for name, value in ranks.items()}
    return fork(host, fn, *args, MASTER_ADDR=master, MASTER_PORT=PORT, **variables)


def call_inside(place: tuple[str, str, str], fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Move this process, which must have one thread, to a virtual host as `VirtualHost` does, and call a function."""
    namespace, names, name = place
    libc = ctypes.CDLL(None, use_errno=True)

    def succeed(answer: int, what: str) -> None:
        if answer:
            raise OSError(ctypes.get_errno(), f"{what} of {name}")

    with open(namespace) as file:
        succeed(libc.setns(file.fileno(), 0), "network")
    succeed(libc.unshare(NEW_MOUNTS | NEW_NAME), "mounts and name")
    succeed(libc.mount(b"none", b"/", None, PRIVATE, None), "private mounts")
    succeed(libc.mount(b"host", b"/sys", b"sysfs", 0, None), "network cards")
    succeed(libc.mount(names.encode(), b"/etc/hosts", None, BIND, None), "names")
    socket.sethostname(name)
    return fn(*args)


def _variables(more: Mapping[str, str]) -> dict[str, str]:
    env = {name: value for name, value in environment().items() if not name.startswith(("MASTER_", "GLOO_"))}
    return {**env, "HF_HUB_OFFLINE": "1", **more}


def ends(processes: Sequence[Process | subprocess.Popen], seconds: float) -> list[tuple[int, str]]:
    """Wait for all processes, and return their exit codes and outputs. After `seconds`, kill them and fail."""
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
    """Return the error lines of an output."""
    return [line for line in output.splitlines() if line.startswith("error: ")]


def python(*words: str) -> list[str]:
    """Return the command of a module in this interpreter."""
    return [sys.executable, "-m", *words]
