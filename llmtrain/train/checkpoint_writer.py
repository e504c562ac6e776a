"""Checkpoint writer: a background thread that writes the files, their digests and state.json, then renames the
folder."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from llmtrain.errors import TrainingError
from llmtrain.parallel.comms import Comms
from llmtrain.threads import with_current_device
from llmtrain.train.integrity import STATE_FILE, digests, dump_state

warnings.filterwarnings("ignore", ".*the intent is to save in a single process", UserWarning)  # which is intended


class CheckpointWriter:
    """Writer of one checkpoint. Every rank creates one, over `comms`, which nothing else may use until the
    writer is done.

    `tensors` must not change until then. `state` is the content of state.json except for `files` and `ranks`;
    each rank contributes its `progress` to `ranks`. `on_complete` is called on the main rank.
    """

    def __init__(
        self,
        final: Path,
        tensors: dict[str, torch.Tensor],
        state: dict[str, Any],
        progress: dict[str, Any],
        comms: Comms,
        on_complete: Callable[[], None],
    ):
        self.final, self.temporary, self._tensors, self._comms = final, final.with_suffix(".tmp"), tensors, comms
        self._state, self._progress, self._on_complete = state, json.dumps(progress), on_complete
        self.seconds = 0.0
        """Seconds that writing took, set when it is done."""
        self.error: str | None = None
        # A daemon, because a hanging disk must not keep the process alive after the run has given up on it.
        self._thread = threading.Thread(target=with_current_device(self._run), name=f"writes {final.name}", daemon=True)

    def start(self, in_thread: bool) -> None:
        """Start writing in the background. If not `in_thread`, write before returning."""
        if in_thread:
            self._thread.start()
        else:
            self._run()
            self.check()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_seconds: float) -> None:
        """Wait until the checkpoint is written. Raises TrainingError if writing fails or takes longer than
        `timeout_seconds`."""
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        if not self.is_done:
            raise TrainingError(
                f"{self.final} was not written within {timeout_seconds:g} s (run.timeout_seconds); is the disk there? Start the "
                "same command again to continue from the last checkpoint"
            )
        self.check()

    def check(self) -> None:
        """Raise TrainingError if writing failed."""
        if self.error is not None:
            raise TrainingError(
                f"{self.final} could not be written: {self.error}; older checkpoints are as they were, start the same command "
                "again to continue from the last one"
            )

    def _run(self) -> None:
        began = time.monotonic()
        try:
            where = {"process_group": self._comms.group, "no_dist": self._comms.size == 1}
            # No copies ahead: tensors on the CPU need none, and for each tensor torch would wait for the GPU's stream,
            # and so for all work that training has queued on it.
            writer = dcp.FileSystemWriter(self.temporary, per_thread_copy_ahead=0)
            dcp.save(self._tensors, storage_writer=writer, **where)
            self._tensors = {}  # frees memory for the next checkpoint
            self._commit()
        except CheckpointException as error:  # a BaseException
            self.error = one_line(next(iter(error.failures.values()))[0])
        except Exception as error:
            self.error = one_line(error)
        if self.error is not None and self._comms.rank == 0:
            shutil.rmtree(self.temporary, ignore_errors=True)  # frees space if the disk is full
        self.seconds = time.monotonic() - began

    def _commit(self) -> None:
        """Gather digests, each rank reading its share of the files, and publish the checkpoint on the main
        rank. Raises OSError on every rank if any rank fails."""
        names = self._from_main(_catch_os_error(lambda: sorted(path.name for path in self.temporary.iterdir())))
        if isinstance(names, str):
            raise OSError(names)
        share = names[self._comms.rank :: self._comms.size]
        mine = self._progress, _catch_os_error(lambda: digests(self.temporary, share))
        of_ranks = self._comms.all_gather_object(mine, f"gathering digests of {self.final.name}")
        problem = self._from_main(self._publish(of_ranks) if self._comms.rank == 0 else None)
        if problem is not None:
            raise OSError(problem)

    def _publish(self, of_ranks: list[tuple[str, dict | str]]) -> str | None:
        """Write state.json and rename the folder. Return None, or an error in one line that all ranks can
        raise."""
        if problem := next((found for _, found in of_ranks if isinstance(found, str)), None):
            return problem
        self._state["ranks"] = [json.loads(progress) for progress, _ in of_ranks]
        self._state["files"] = {name: digest for _, found in of_ranks for name, digest in found.items()}
        try:
            atomic_write(self.temporary / STATE_FILE, dump_state(self._state))
            if self.final.exists():
                shutil.rmtree(self.final)
            self.temporary.rename(self.final)
            atomic_write(self.final.parent / "latest", self.final.name + "\n")
            self._on_complete()
        except OSError as error:
            return one_line(error)
        return None

    def _from_main(self, value: Any) -> Any:
        return self._comms.broadcast_object(value, f"writing {self.final.name}")


def atomic_write(path: Path, text: str) -> None:
    """Write a file so that a crash leaves either the old or the new content."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the renames durable, too
    finally:
        os.close(folder)


def _catch_os_error(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, or its OSError in one line that can be sent to other ranks."""
    try:
        return work()
    except OSError as error:
        return one_line(error)


def one_line(error: BaseException) -> str:
    """Return an exception's message in one line, or its class name if the message is empty."""
    return " ".join(str(error).split())[:200] or type(error).__name__
