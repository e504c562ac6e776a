"""Background thread that takes part in group averages on behalf of a late replica (WAGMA, arXiv 2005.00124).

An iteration is the group average of one local step. Each iteration runs once, in order. It starts when the first replica arrives.
Every replica's thread then contributes its replica's newest message, and keeps the sum until the replica collects it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from llmtrain.errors import TrainingError
from llmtrain.parallel.comms import Comms, Traffic
from llmtrain.parallel.wire_format import WireFormat

Payloads = list[torch.Tensor]
"""A message to the group: a replica's pseudo-gradients, one flat CPU tensor per block."""
WAKE_TIMEOUT = timedelta(days=1)
"""Time limit of one wait for a wake signal. It is long because a waiting thread delays no replica."""


class WakeSignal:
    """Signal with which the first replica at an iteration wakes the other replicas' threads, sent through the job's store.

    The training thread announces and the background thread waits, each over its own connection to the store. Several replicas may
    announce the same iteration; only the first announcement has an effect.
    """

    def __init__(self, store: dist.Store):
        self._announcing, self._waiting = store, store.clone()
        self._waiting.set_timeout(WAKE_TIMEOUT)

    def announce(self, iteration: int) -> None:
        """Start iteration `iteration` on all replicas, unless it has started."""
        self._announcing.set(_wake_key(iteration), b"go")

    def wait(self, iteration: int) -> bool:
        """Wait until iteration `iteration` has started and return True, or return False once `end` announces that it never will."""
        # `get` itself waits for the key, which saves the round trip of a separate wait.
        return self._waiting.get(_wake_key(iteration)) == b"go"

    def end(self, iteration: int) -> None:
        """Announce that iteration `iteration` will never start, so that threads waiting for it return."""
        self._announcing.set(_wake_key(iteration), b"end")

    def forget(self, iterations: Iterable[int]) -> None:
        """Delete the keys of iterations for which no thread will wait any more."""
        for iteration in iterations:
            self._announcing.delete_key(_wake_key(iteration))


def _wake_key(iteration: int) -> str:
    return f"llmtrain/activation/{iteration}"


def copy_of(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a copy of `part`, in pinned memory if `like` is."""
    return torch.empty_like(part, pin_memory=like.is_pinned()).copy_(part)


class GroupAverager:
    """Background thread that sums messages over the group `group_of(iteration)`.

    The thread skips iterations for which `is_global` is true. In these, the training threads average over all replicas, and
    afterwards no replica contributes an older message. A message's version is the iteration in which it was published. In a
    replica with several ranks, the first rank chooses the version that all ranks contribute, and sends its number over
    `shard_comms`.
    """

    def __init__(
        self,
        group_of: Callable[[int], Comms],
        is_global: Callable[[int], bool],
        shard_comms: Comms,
        wake_signal: WakeSignal,
        wire: WireFormat | None,
        timeout_seconds: float,
    ):
        self.group_of, self.is_global, self.shard_comms = group_of, is_global, shard_comms
        self.wake_signal, self.wire, self.timeout_seconds = wake_signal, wire, timeout_seconds
        self.traffic = Traffic()
        self._changed = threading.Condition()
        self._posted: dict[int, Payloads] = {}
        self._sums: dict[int, tuple[Payloads, int]] = {}
        self._done = -1  # the last iteration run, or skipped as global
        self._last_global = -1  # the last global iteration: older messages are relative to another anchor
        self._forgotten = 0
        self._closing = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, iteration: int, newest: int, message: Payloads) -> None:
        """Start the thread at `iteration`. `message` is this replica's newest message so far, from iteration `newest`."""
        self._posted, self._done, self._forgotten = {newest: message}, iteration - 1, iteration
        self._thread = threading.Thread(target=self._run, name="group averages", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    def publish(self, iteration: int, message: Payloads) -> None:
        """Publish this replica's message for `iteration`. The first shard rank wakes the other replicas, unless the
        thread has already run the iteration or the iteration is global."""
        with self._changed:
            if self.is_global(iteration):
                self._posted.clear()  # after a global average, no older message may be contributed
            self._posted[iteration] = message
            is_late = self._done >= iteration
            self._changed.notify_all()
        if self.shard_comms.rank == 0 and not is_late and not self.is_global(iteration):
            self.wake_signal.announce(iteration)

    def collect(self, iteration: int) -> tuple[Payloads, int]:
        """Wait until the thread has run `iteration`, and return (sum over the group, iteration of the message that this
        replica contributed). The wait does not depend on when other replicas arrive, because their threads contribute on their
        behalf. Raises TrainingError if a peer is gone or too slow."""
        with self._changed:
            self._wait(lambda: iteration in self._sums, f"the group's sum of iteration {iteration}")
            return self._sums.pop(iteration)

    def latest(self) -> tuple[int, Payloads]:
        """Return the iteration of the newest message, and the message."""
        with self._changed:
            return max(self._posted), self._posted[max(self._posted)]

    def prune(self, iteration: int) -> None:
        """Delete the store keys of all earlier iterations. One rank calls it, after all replicas have run them."""
        self.wake_signal.forget(i for i in range(self._forgotten, iteration) if not self.is_global(i))
        self._forgotten = iteration

    def finish(self, iteration: int) -> None:
        """End the thread before `iteration` and wait for it. All replicas must have run all earlier iterations."""
        if self._thread is not None:
            while self.is_global(iteration):
                iteration += 1
            self.wake_signal.end(iteration)
            self._thread.join(2 * self.timeout_seconds)  # one iteration may be running, and another may be due
            if self._thread.is_alive():
                raise TrainingError(
                    f"the last group average has not ended within {2 * self.timeout_seconds:g} s (twice run.timeout_seconds); a peer "
                    "died or is too slow; start the same command again to continue from the last checkpoint"
                )
            self._thread = None

    def close(self) -> None:
        """Tell the thread to stop, after a failure, without waiting for it. A thread that is blocked on the store or in a
        collective ends with the process at the latest."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread = None

    def _run(self) -> None:
        try:
            iteration = self._done + 1
            while not self._closing:
                if self.is_global(iteration):
                    self._last_global = iteration
                elif self.wake_signal.wait(iteration):
                    self._run_iteration(iteration)
                else:
                    return
                with self._changed:
                    self._done = iteration
                    self._changed.notify_all()
                iteration += 1
        except BaseException as error:  # the training thread raises it in its next `collect`
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _run_iteration(self, iteration: int) -> None:
        with self._changed:
            self._wait(
                lambda: max(self._posted) >= self._last_global,
                f"this replica's average of iteration {self._last_global}",
            )
            version = torch.tensor(max(self._posted), device="cpu")
        version = int(self.shard_comms.all_gather(version, "choosing a version")[0])
        with self._changed:
            self._wait(lambda: version in self._posted, f"this rank's model of iteration {version}")
            if self._closing:
                return
            # Drop older messages first, so that a replica that is never late keeps two models in CPU memory, as the memory plan
            # assumes, and not three.
            self._posted = {i: posted for i, posted in self._posted.items() if i >= version}
            message = [copy_of(part, part) for part in self._posted[version]]
        group = self.group_of(iteration)
        what = f"group average of iteration {iteration}"
        in_flight = [group.start_all_reduce(part, what, self.wire) for part in message]
        for pending in in_flight:
            pending.start_second_phase()
        # Copy into the message, which is in pinned memory if there is a GPU.
        sums = [part.copy_(pending.wait()) for part, pending in zip(message, in_flight, strict=True)]
        with self._changed:
            self._sums[iteration] = sums, version

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for `condition` or `close`, with the lock held. Raises TrainingError if the thread failed or after
        `timeout_seconds`."""
        deadline = time.monotonic() + self.timeout_seconds
        while not condition() and not self._closing:
            if self._error is not None:
                raise TrainingError(str(self._error)) from self._error
            if not self._changed.wait(timeout=max(0.0, deadline - time.monotonic())) and not condition():
                raise TrainingError(f"waited {self.timeout_seconds:.0f} s for {what}; a peer died or is too slow")
