"""Pool of ranks: processes forked from the mother that outlive a test, so that each test pays only for its collectives."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import connection
from typing import Any

from tests.mother import Mother, Process, session

GRACE_SECONDS = 5.0
"""Seconds that the other ranks have to notice that one has failed, before they are killed."""
_HOLD_GROUPS = ("DeepSpeedEngine", "Init", "Comms", "Mesh")
"""Classes of objects that are reachable from the parameters of an engine of stage 3."""


class RankFailure(AssertionError):
    """Failure of a rank that raised, died or did not answer. The message names the rank and has its traceback."""


class RankPool:
    """`world_size` processes that run module-level functions, each time inside a fresh process group. The group uses gloo, and NCCL
    for tensors on GPUs if there are any.

    The first call forks the processes. `environment` is added to this process's environment; if the ranks have a mother of their
    own, this happens before anything is imported. After a rank has died or hung, all are killed, and the next call forks new ones.
    """

    def __init__(
        self, world_size: int, environment: Mapping[str, str] | None = None, own_mother: bool | None = None
    ) -> None:
        """Prepare for `world_size` ranks. By default, they have a mother of their own if there is an `environment`."""
        has_own = bool(environment) if own_mother is None else own_mother
        self.world_size, self._environment = world_size, environment
        self._mother = Mother(environment) if has_own else session()
        self._ranks: list[tuple[Process, connection.Connection]] = []  # (process, our end of its pipe)

    def run(self, fn: Callable[..., Any], *args: Any, world_size: int | None = None, timeout: float = 120.0) -> list:
        """Call `fn(*args)` on the first `world_size` ranks (default: all of them), and return the results by rank.

        `fn` travels by reference; arguments and results are pickled by value. Collectives time out at half of `timeout` (seconds),
        so that a hanging one is reported with its traceback. Raises RankFailure. If something else interrupts the call
        (pytest-timeout), the ranks are killed, because the next call would take their late answers for its own.
        """
        size = world_size or self.world_size
        assert size <= self.world_size, f"the pool has {self.world_size} ranks, {size} were asked for"
        self._start()
        with tempfile.TemporaryDirectory() as folder:
            task = pickle.dumps((fn, args))
            meeting = (f"file://{folder}/store", size, timeout / 2)
            try:
                for rank, (_, pipe) in enumerate(self._ranks[:size]):
                    pipe.send_bytes(pickle.dumps((list(sys.path), rank, *meeting, task)))
                return self._collect(size, time.monotonic() + timeout)
            except RankFailure:
                raise
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End the processes, and kill those that do not end by themselves. The next call starts new ones."""
        for _, pipe in self._ranks:
            pipe.close()
        deadline = time.monotonic() + 1.0
        for process, _ in self._ranks:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._ranks = []

    def _start(self) -> None:
        if any(process.poll() is not None for process, _ in self._ranks):
            self.close()
        while len(self._ranks) < self.world_size:
            ours, theirs = socket.socketpair()
            with theirs:
                process = self._mother.fork(_serve, environment=self._environment, descriptors=[theirs.fileno()])
            self._ranks.append((process, connection.Connection(ours.detach())))

    def _collect(self, size: int, deadline: float) -> list:
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks[:size])}
        results: list[Any] = [None] * size
        failures: list[tuple[float, str]] = []  # (when, what): most ranks fail only because the first one is gone
        while waiting:
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                silent = ", ".join(str(rank) for rank in waiting.values())
                failures.append((time.monotonic(), f"rank {silent}: no answer in time; the pool was killed"))
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    failed_at, results[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    code = self._ranks[rank][0].wait(GRACE_SECONDS)
                    failed_at, results[rank] = 0.0, f"died with exit code {code}"
                if failed_at is not None:
                    failures.append((failed_at, f"rank {rank}: {results[rank]}"))
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if failures:
            raise RankFailure(min(failures)[1])
        return results


def _serve(descriptor: int) -> None:
    """Take tasks until the other end is gone. Answer each with (None, result) or (time of failure, traceback)."""
    import torch
    import torch.distributed as dist

    from tests.inside_torch import forget_shardings

    pipe = connection.Connection(descriptor)
    os.environ["LOCAL_SIZE"] = "1"  # otherwise DeepSpeed runs numactl each time that it counts devices
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    while True:
        try:
            sys.path[:], rank, store, size, seconds, task = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        try:
            dist.init_process_group(
                backend, init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
            )
            dist.barrier()  # or a rank whose task sends nothing leaves before the others have connected to it
            fn, args = pickle.loads(task)
            # Plain pickle copies tensors; the pipe's own send() would pass them through shared memory.
            answer = pickle.dumps((None, fn(*args)))
        except BaseException:  # also SystemExit: the test has to see whatever happens in a rank
            answer = pickle.dumps((time.monotonic(), traceback.format_exc()))
        _end_deepspeed()
        forget_shardings()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # groups in reference cycles have sockets, and threads that wake up 100 times per second
        pipe.send_bytes(answer)


def _end_deepspeed() -> None:
    """Destroy DeepSpeed's engines, and clear the objects that they leave, because C++ keeps their parameters, and with them their
    process groups."""
    import torch

    engines = [left for left in gc.get_objects() if type(left).__name__ == "DeepSpeedEngine"]
    for engine in engines:
        with contextlib.suppress(Exception):  # after a failure, or destroyed before
            engine.destroy()
    for left in gc.get_objects() if engines else []:
        if type(left) is torch.nn.Parameter or type(left).__name__ in _HOLD_GROUPS:
            vars(left).clear()
