"""`llmtrain train` in a process forked by the rank server, made to behave like a separately started program."""

import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path

import torch

from llmtrain.errors import DONE, exit_with_status
from llmtrain.parallel.world import World
from llmtrain.recipe_loader import load_recipe
from llmtrain.train.output import outlive_readers
from llmtrain.train.run import run_training
from llmtrain.train.signals import request_stop

LEAVE_SECONDS = 5.0
"""Seconds that a rank whose run is complete gives torchrun's agent to read its result. The agent looks ten times per second."""


def become_a_program() -> None:
    """Give this process its own session, signal handlers, name, output and threads, like those of a separately started
    program."""
    os.setsid()  # a Ctrl-C in the terminal reaches ranks only through torchrun
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores these signals
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    Path("/proc/self/comm").write_text(f"llmtrain-{os.environ['RANK']}", encoding="utf-8")  # for ps and top
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # like python -u
    outlive_readers()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))  # a list is one number per nesting level
    threading.Thread(target=_stop_without_launcher, daemon=True, name="watches the launcher").start()


def leave_soon() -> None:
    """End this process, whose run is complete, after LEAVE_SECONDS at the latest.

    Normally, torchrun's agent tells each rank to end once it has the results of all ranks. After a signal, however, the
    agent only waits for the ranks to end, for up to `run.timeout_seconds`.
    """
    timer = threading.Timer(LEAVE_SECONDS, os._exit, [DONE])
    timer.daemon = True
    timer.start()


def train(recipe: str, overrides: list[str]) -> int:
    """Train as one rank, and return the exit code."""
    code = run_training(load_recipe(Path(recipe), overrides), World.from_environment())
    if code == DONE:
        leave_soon()
    return code


def _stop_without_launcher() -> None:
    """Wait until the launcher is gone, then ask this process to stop with a checkpoint. Nothing else would stop this process, because
    its parent is the rank server, which lives as long as any rank."""
    multiprocessing.parent_process().join()
    request_stop()


if __name__ == "__main__":
    become_a_program()
    recipe, *overrides = sys.argv[1:]
    exit_with_status(lambda: sys.exit(train(recipe, overrides)))
