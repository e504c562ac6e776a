"""Functions that unit tests call in a separate process, forked by `tests.mother`, which is killed, holds a lock, or fails."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from llmtrain.config import DataSection
from llmtrain.data import extend as extending
from llmtrain.data import loader
from llmtrain.data import prepare as preparing
from llmtrain.data.dataset import ShardWriter, TokenShards
from llmtrain.data.loader import PrefetchLoader
from llmtrain.errors import DONE, DataError, TrainingError, exit_with_status, leave
from llmtrain.launch import torchrun, watchdog

ERRORS = {
    "no peer": TrainingError("no peer"),
    "no file": DataError("no file"),
    "CUDA out of memory": RuntimeError("CUDA out of memory"),
}
KILLED_AT = {
    "no folder yet": (Path, "rename", 1),
    "half written": (ShardWriter, "_write_header", 11),
    "no index yet": (Path, "rename", 4),
}
"""Points at which `prepare_until_killed` is killed: the owner and name of a function, and the number of its call."""


def end(message: str, on_gpu: bool) -> None:
    """Fail as a command does, or end with DONE if `message` is empty, while a thread is still running. The thread ends
    after a moment, or never if `on_gpu`."""
    torch.cuda.is_initialized = lambda: on_gpu
    goes_on = threading.Event()

    def wait_for_others() -> None:  # like the end of an interpreter while its GPU is in a collective
        goes_on.wait(None if on_gpu else 0.1)
        print("the thread has ended")

    def command() -> None:
        threading.Thread(target=wait_for_others).start()
        if message:
            raise ERRORS[message]
        print("complete")
        leave(DONE)

    exit_with_status(command)
    raise AssertionError("it went on")


def prepare_until_killed(data: str, where: str) -> None:
    """Prepare `data`, a DataSection as JSON, and kill this process at the point `where` of KILLED_AT."""
    extending.BATCH_CHARACTERS, extending.COMMIT_SECONDS = 1000, 0.0
    owner, name, number = KILLED_AT[where]
    setattr(owner, name, _killed_in_call(number, getattr(owner, name)))
    preparing.prepare(DataSection.model_validate_json(data), 10**9, 10**9)


def _killed_in_call(number: int, inner: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def wrapped(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*arguments)

    return wrapped


def prepare_and_say_when(data: str) -> None:
    """Prepare `data`, a DataSection as JSON, and print the modification time of the index."""
    made = preparing.prepare(DataSection.model_validate_json(data), 500, 100)
    print((made.directory / "index.json").stat().st_mtime_ns, flush=True)


def hold_lock(path: str) -> None:
    """Hold a lock until this process is killed."""
    import filelock

    lock = filelock.FileLock(path)  # in a variable, because deleting the object would release the lock
    lock.acquire()
    print("held", flush=True)
    signal.pause()


class _Disk:
    """A loader that returns many tensors, or that never answers."""

    state_dict, tokens, mean_replica_tokens, relative_part = dict, TokenShards([]), 1.0, 1.0

    def __init__(self, answers: bool) -> None:
        self._answers = answers

    def next(self) -> list[torch.Tensor]:
        """Return tensors that take a while to draw, or block forever."""
        if not self._answers:
            threading.Event().wait()
        return [torch.randn(100) for _ in range(5000)]


def read_from_a_silent_disk() -> None:
    """Give up on a batch, and print the error. The thread that reads the batch never finishes."""
    try:
        PrefetchLoader(_Disk(answers=False), timeout_seconds=0.05).next()
    except TrainingError as error:
        print(error, flush=True)


def end_while_a_batch_is_read() -> None:
    """Take a batch and return while the next one is being read. No line about a slow batch is printed."""
    loader.QUIET_SECONDS = 100.0
    PrefetchLoader(_Disk(answers=True), timeout_seconds=100).next()


def launch(looks: str, failed: str, *commands: str) -> None:
    """Start shell commands as a launcher starts ranks. Print their process ids, then their return codes. The file `looks` grows
    by a byte whenever the watchdog asks whether ranks of another node have failed; they have once the file `failed` exists."""
    watchdog.POLL_SECONDS, watchdog.PATIENCE_SECONDS = 0.05, 0.3

    def asked() -> bool:
        with open(looks, "a") as file:
            file.write(".")
        return os.path.exists(failed)

    with watchdog.kill_hung_ranks(asked):
        ranks = [subprocess.Popen(["bash", "-c", command], start_new_session=True) for command in commands]
        print(*(rank.pid for rank in ranks), flush=True)
        print(*(rank.wait() for rank in ranks), flush=True)


def be_stopped_while_the_recipe_is_read() -> int:
    """Launch, with a signal to stop while the recipe is read. Return the launcher's exit code."""
    torchrun.load_recipe = lambda *arguments: os.kill(os.getpid(), signal.SIGUSR1)
    return torchrun.launch_torchrun(Path("r.yaml"), [])
