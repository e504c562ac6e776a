"""Errors of one rank that are raised on every rank: failed reads and writes, damaged data, and failed or hanging work of
the main rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from llmtrain.data.checksum_scan import ChecksumScan
from llmtrain.errors import DataError, TrainingError, UserError, one_line
from llmtrain.parallel.mesh import Mesh

T = TypeVar("T")
POLL_SECONDS = 2.0
"""Seconds between the messages in which the main rank reports that it is still working."""


def raise_on_all(mesh: Mesh, work: Callable[[], T]) -> T:
    """Call `work` on each rank and return its result. If it raises a UserError or TrainingError on any rank, raise the
    error of the first such rank on every rank. A collective of all ranks."""
    mine: UserError | TrainingError | None = None
    try:
        result = work()
    except (UserError, TrainingError) as error:
        mine = error
    errors = mesh.all_ranks.all_gather_object(mine, "asking all ranks for errors")
    errors = [error for error in errors if error is not None]
    del mine  # this frame and its error would refer to each other, and keep alive what callers hold, such as locks
    if errors:
        errors[0].is_shared = True
        raise errors.pop(0)
    return result


class IoErrors:
    """I/O errors of one run on this rank, recorded until all ranks can raise them together: failed writes, damaged token
    shards, and text that can't be tokenized."""

    def __init__(self, mesh: Mesh, scan: ChecksumScan, text_problem: Callable[[], DataError | None] | None = None):
        """Start without failed writes. `scan` finds damaged token shards. `text_problem()` returns the error that has ended
        tokenizing on this host, or None."""
        self._mesh, self._scan = mesh, scan
        self._text_problem = text_problem or (lambda: None)
        self._unwritten: UserError | TrainingError | None = None
        """Error of the first failed write."""

    @property
    def found(self) -> UserError | TrainingError | None:
        """Return this rank's error, which the next `check` raises; None if there is none."""
        return self._scan.problem or self._text_problem() or self._unwritten

    def write(self, path: Path, work: Callable[[], T]) -> T | None:
        """Return the result of `work`, which writes to `path`. If it raises an OSError, UserError or TrainingError,
        record the error and return None."""
        try:
            return work()
        except (UserError, TrainingError) as error:
            self._unwritten = self._unwritten or error
        except OSError as error:
            again = "start the same command again to continue from the last checkpoint"
            problem = f"{path} could not be written: {one_line(error)}; {again}"
            self._unwritten = self._unwritten or TrainingError(problem)
        return None

    def check(self) -> None:
        """Raise an error on every rank if any rank has one: DataError for damaged token shards and text that can't be
        tokenized, TrainingError for a failed write, or another error that `write` has recorded. A collective of all
        ranks."""
        raise_on_all(self._mesh, self._raise)

    def _raise(self) -> None:
        if (error := self.found) is not None:
            raise error


def run_on_main(mesh: Mesh, what: str, work: Callable[[], T], timeout_seconds: float, progress: Callable[[], int]) -> T:
    """Run `work` on the main rank and return its result on every rank. A collective of all ranks.

    `work` may take longer than the timeout of a collective, because the main rank reports every POLL_SECONDS that it is still
    working. Raises, on every rank, a UserError or TrainingError of `work`, or a TrainingError that names `what` once
    `progress()` has not changed for `timeout_seconds`.
    """
    result: Future[T] = Future()
    so_far, last_progress = 0, time.monotonic()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    def look() -> tuple[T] | None:
        """Wait at most `POLL_SECONDS`, then return the result in a tuple, or None if `work` is still running."""
        nonlocal so_far, last_progress
        wait([result], min(POLL_SECONDS, timeout_seconds))
        if result.done():
            return (result.result(),)
        if (now := progress()) != so_far:
            so_far, last_progress = now, time.monotonic()
        elif time.monotonic() - last_progress > timeout_seconds:
            raise TrainingError(
                f"{what}: no answer for {timeout_seconds:g} s (run.timeout_seconds); start the same command again"
            )
        return None

    if mesh.is_main:
        so_far = progress()
        # A daemon, because hanging work must not keep the process alive after the run has given up on it.
        threading.Thread(target=run, name=what, daemon=True).start()
    while (answer := mesh.broadcast_from_main(look)) is None:
        pass
    return answer[0]
