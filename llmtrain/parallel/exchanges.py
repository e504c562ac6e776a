"""Exchanges of rounded and sparse messages, in which every rank sends a part to every other rank.

gloo sends a message once its receiver has signaled that it is ready. In gloo's own all-to-all, a rank signals this after it
has handed over its own messages, so the signal waits in the queue behind those bytes. On a slow network, the signal arrives so
late that the link is idle for a fifth of the time. On a long link, every exchange takes a round trip. Over gloo, an exchange
therefore consists of messages between pairs of ranks, and all of its receives are posted before anything is computed or sent.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from llmtrain.parallel.comms import Comms

ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""All-gather into one tensor. torch 2.13 has renamed it, and its old name warns."""

TAGS = range(1 << 29, 1 << 30)
"""Tags of messages between two ranks. A user's own messages on the same group are unlikely to have tags this large."""
_NUMBERS: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
"""Next exchange number of each process group. It is counted per group, not per `Comms`: a `Comms` that was dropped may have left
receives posted, and messages of a later `Comms` on the same group must not match them."""


class CollectiveExchange:
    """Exchange by a collective of the backend. Parts arrive in `received`, [ranks, bytes], in the row of the rank that
    sends them."""

    received: torch.Tensor

    def __init__(self, comms: Comms, what: str, part_bytes: int):
        """Prepare to receive `part_bytes` bytes from each rank. The memory for these bytes is allocated when this rank
        sends. `what` is the label in errors and traces. All ranks create their exchanges in the same order."""
        self._comms, self._what, self._part_bytes = comms, what, part_bytes

    def send_parts(self, parts: torch.Tensor) -> dist.Work:
        """Send row r of `parts`, [ranks, bytes], to each rank r. Return the work that fills `received`."""
        self.received = _buffer(self._comms, self._part_bytes)
        sent = (self._comms.size - 1) * parts.shape[1]
        return self._comms.start_work(self._what, sent, dist.all_to_all_single, self.received, parts)

    def send_to_all(self, part: torch.Tensor) -> dist.Work:
        """Send the flat bytes `part` to all ranks. Return the work that fills `received`."""
        self.received = _buffer(self._comms, self._part_bytes)
        sent = (self._comms.size - 1) * len(part)
        return self._comms.start_work(self._what, sent, ALL_GATHER, self.received.view(-1), part)


class PeerExchange:
    """Exchange over gloo by messages between two ranks. Creating it posts the receives."""

    def __init__(self, comms: Comms, what: str, part_bytes: int):
        """Post the receives. The arguments and the order of creation are as for CollectiveExchange."""
        self._comms, self._what, self.received = comms, what, _buffer(comms, part_bytes)
        self._tag = TAGS[next(_NUMBERS.setdefault(comms.group, itertools.count())) % len(TAGS)]
        peers = [(comms.rank - distance) % comms.size for distance in range(1, comms.size)]
        self._receiving = self._started(
            lambda: [
                dist.irecv(self.received[peer], group=comms.group, group_src=peer, tag=self._tag) for peer in peers
            ]
        )

    def send_parts(self, parts: torch.Tensor) -> PeerWork:
        """Send row r of `parts` to each rank r, as CollectiveExchange does."""
        return self._send(list(parts))

    def send_to_all(self, part: torch.Tensor) -> PeerWork:
        """Send the flat bytes `part` to each rank, as CollectiveExchange does."""
        return self._send([part] * self._comms.size)

    def _send(self, parts: Sequence[torch.Tensor]) -> PeerWork:
        comms = self._comms
        on_arrival = comms.note_message(self._what, sum(map(len, parts)) - len(parts[comms.rank]))
        self.received[comms.rank].copy_(parts[comms.rank])
        peers = [(comms.rank + distance) % comms.size for distance in range(1, comms.size)]
        sending = self._started(
            lambda: [dist.isend(parts[peer], group=comms.group, group_dst=peer, tag=self._tag) for peer in peers]
        )
        return PeerWork([*self._receiving, *sending], parts, on_arrival)

    def _started(self, start: Callable[[], list[dist.Work]]) -> list[dist.Work]:
        try:
            return start()
        except RuntimeError as error:
            raise self._comms.failure(self._what, error) from error


def _buffer(comms: Comms, part_bytes: int) -> torch.Tensor:
    """Return memory for the parts of all ranks."""
    return torch.empty(comms.size, part_bytes, dtype=torch.uint8, device=comms.device)


class PeerWork:
    """Messages of an exchange with every other rank, in flight."""

    def __init__(
        self, works: Sequence[dist.Work], parts: Sequence[torch.Tensor], on_arrival: Callable[[], None] | None
    ):
        """Keep `parts` alive until they are sent. `on_arrival`, if given, is called once all messages have arrived."""
        self._works, self._parts = works, parts
        self._is_complete = False
        self._watched: Future[None] | None = None
        if on_arrival is not None:  # gloo reports an arrival only to a thread that waits
            self._watched = Future()
            threading.Thread(target=self._watch, args=(on_arrival,), name="message", daemon=True).start()

    def is_completed(self) -> bool:
        """Return whether `wait` has returned. gloo does not say earlier whether the messages have arrived."""
        return self._is_complete

    def wait(self) -> None:
        """Wait for all messages. Raises RuntimeError, as other work of gloo does, if a peer died or was too late."""
        if self._watched is not None:
            self._watched.result()
        else:
            self._wait_for_all()
        self._is_complete = True

    def _wait_for_all(self) -> None:
        for work in self._works:
            work.wait()

    def _watch(self, on_arrival: Callable[[], None]) -> None:
        try:
            self._wait_for_all()
            on_arrival()
            self._watched.set_result(None)
        except BaseException as error:  # the training thread raises it in `wait`
            self._watched.set_exception(error)
