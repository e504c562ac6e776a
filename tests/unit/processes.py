"""What unit tests have done in a process of its own, forked by `tests.mother`: it is killed, holds a lock, or ends badly."""

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
from llmtrain.errors import DataError, TrainingError, exit_with_status
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
"""Where preparing is killed: in which call of what."""


def fail(message: str, on_gpu: bool) -> None:
    """Fail as a command does, with a thread left that ends after a moment, or with `on_gpu` never."""
    torch.cuda.is_initialized = lambda: on_gpu
    goes_on = threading.Event()

    def wait_for_others() -> None:  # as an interpreter does that ends while its GPU is in a collective
        goes_on.wait(None if on_gpu else 0.1)
        print("the thread has ended")

    def command() -> None:
        threading.Thread(target=wait_for_others).start()
        raise ERRORS[message]

    exit_with_status(command)
    raise AssertionError("it went on")


def prepare_until_killed(data: str, where: str) -> None:
    """Prepare `data`, a DataSection as JSON, and be killed in the middle."""
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
    """Prepare `data` as JSON; print when the folder was made."""
    made = preparing.prepare(DataSection.model_validate_json(data), 500, 100)
    print((made.directory / "index.json").stat().st_mtime_ns, flush=True)


def hold_lock(path: str) -> None:
    """Hold a lock until this process is killed."""
    import filelock

    lock = filelock.FileLock(path)  # which its deletion would release
    lock.acquire()
    print("held", flush=True)
    signal.pause()


class _Disk:
    """A loader of many tensors, or one that never answers."""

    state_dict, tokens, mean_replica_tokens, relative_part = dict, TokenShards([]), 1.0, 1.0

    def __init__(self, answers: bool) -> None:
        self._answers = answers

    def next(self) -> list[torch.Tensor]:
        """Return what takes a while to draw."""
        if not self._answers:
            threading.Event().wait()
        return [torch.randn(100) for _ in range(5000)]


def read_from_a_silent_disk() -> None:
    """Give a batch up; the thread that reads it is never done."""
    try:
        PrefetchLoader(_Disk(answers=False), timeout_seconds=0.05).next()
    except TrainingError as error:
        print(error, flush=True)


def end_while_a_batch_is_read() -> None:
    """Take a batch and end, while the next one is read. Nothing is said about a slow one."""
    loader.QUIET_SECONDS = 100.0
    PrefetchLoader(_Disk(answers=True), timeout_seconds=100).next()


def launch(looks: str, failed: str, *commands: str) -> None:
    """Start shell commands as a launcher does ranks; print their process ids, then how they ended. The file `looks` grows
    by a byte whenever the launcher looks at them. Ranks of another node have failed once the file `failed` exists."""
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
    """Be asked to stop before training begins; return the launcher's exit code."""
    torchrun.load_recipe = lambda *arguments: os.kill(os.getpid(), signal.SIGUSR1)
    return torchrun.launch_torchrun(Path("r.yaml"), [])
