"""Ranks of a mesh as threads of this process, for tests of the ranks' arithmetic and not of a communication backend.

The result of a collective is written when the caller waits for it. Until then, its place holds NaN, so a missing wait
is always detected. Sums are taken in rank order. All ranks end at once if they begin different collectives, if none of
them can continue, or if one of them has raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.errors import TrainingError
from llmtrain.parallel.comms import ALL_GATHER, Comms
from llmtrain.parallel.exchanges import CollectiveExchange
from tests.distributed import fake_engine
from tests.distributed.fake_engine import Scenario
from tests.distributed.trace import Trace

PATIENCE = 20.0
"""Longest wait of a rank of `FreeThreads`, in seconds."""


class Threads:
    """Ranks of one run, with the conditions that they wait for and the reason why they stopped, if they did.

    One rank runs at a time, until it has to wait. Then a rank whose wait is over takes its turn. So a run is the same
    every time, threads do not contend for the interpreter, and a deadlock is known at once.
    """

    def __init__(self, size: int):
        self.size = size
        self.stopped: str | None = None
        self._errors: list[BaseException] = []
        self._turns = [threading.Lock() for _ in range(size)]  # released for the rank that gets the turn
        for turn in self._turns:
            turn.acquire()
        self._waiting: dict[int, tuple[str, Callable[[], bool]]] = {r: ("its start", lambda: True) for r in range(size)}
        self._groups: dict[tuple[str, int, tuple[int, ...]], Group] = {}
        self.changing: AbstractContextManager = nullcontext()
        """Lock that is held while the state that waits depend on changes."""

    def run(self, fn: Callable[[int], Any]) -> list:
        """Call `fn(rank)` on each rank's thread, and return the results by rank. Raises the first error of any rank."""
        results: list[Any] = [None] * self.size

        def run_rank(rank: int) -> None:
            self.begin(rank)
            try:
                results[rank] = fn(rank)
            except BaseException as error:  # also SystemExit: the test must see every error of a rank
                error.add_note(f"on rank {rank}")
                self._errors.append(error)
                self.stop(f"rank {rank} raised {type(error).__name__}: {error}")
            self.end()

        ranks = [threading.Thread(target=run_rank, args=(rank,), name=f"rank {rank}") for rank in range(self.size)]
        for thread in ranks:
            thread.start()
        self.end()
        for thread in ranks:
            thread.join()
        if self._errors:
            raise self._errors[0]
        return results

    def stop(self, why: str) -> None:
        """End all waits, now and later. `stopped` keeps the first reason."""
        self.stopped = self.stopped or why

    def wait_for(self, rank: int, is_met: Callable[[], bool], what: str) -> None:
        """Let other ranks run until the condition is met. Raises RuntimeError, as gloo does, if ranks stop first."""
        if is_met():
            return
        self._waiting[rank] = (what, is_met)
        self.end()
        self.begin(rank)
        if not is_met():
            raise RuntimeError(self.stopped)

    def begin(self, rank: int) -> None:
        """Wait for this rank's turn."""
        self._turns[rank].acquire()

    def end(self) -> None:
        """Give the turn to a rank whose wait is over, because this rank has to wait or has ended."""
        if not self._waiting:
            return
        able = [rank for rank, (_, is_met) in self._waiting.items() if self.stopped or is_met()]
        if not able:
            stands = [f"rank {rank} waits for {what}" for rank, (what, _) in sorted(self._waiting.items())]
            stands += [f"rank {rank} has ended" for rank in range(self.size) if rank not in self._waiting]
            self.stop("no rank can go on: " + "; ".join(stands))
            able = list(self._waiting)
        del self._waiting[able[0]]
        self._turns[able[0]].release()

    def arrived(self) -> None:
        """Note that a rank's wait may be over."""

    def axes(self, rank: int, replicas: int, shard: int) -> tuple[ThreadComms, ThreadComms]:
        """Return a rank's comms along the axes of a mesh of all ranks: (replica, shard)."""
        mine = divmod(rank, shard)
        along_replicas = [replica * shard + mine[1] for replica in range(replicas)]
        along_shards = [mine[0] * shard + other for other in range(shard)]
        return ThreadComms(self, along_replicas, rank, "replica"), ThreadComms(self, along_shards, rank, "shard")

    def group(self, axis: str, number: int, ranks: Sequence[int]) -> Group:
        """Return the `number`-th group that these ranks have made along this axis: one object for all of them."""
        with self.changing:
            return self._groups.setdefault((axis, number, tuple(ranks)), Group(self, ranks))


class FreeThreads(Threads):
    """Ranks that all run at once, for methods that start threads of their own and wait for them. No wait is longer than
    PATIENCE."""

    def __init__(self, size: int):
        super().__init__(size)
        self.changing = self._changed = threading.Condition()

    def begin(self, rank: int) -> None:
        """Do nothing, because ranks take no turns."""

    def end(self) -> None:
        """Do nothing, because no rank waits for a turn."""

    def stop(self, why: str) -> None:
        with self._changed:
            super().stop(why)
            self._changed.notify_all()

    def arrived(self) -> None:
        self._changed.notify_all()

    def wait_for(self, rank: int, is_met: Callable[[], bool], what: str) -> None:
        with self._changed:
            in_time = self._changed.wait_for(lambda: self.stopped or is_met(), PATIENCE)
            if not is_met():
                raise RuntimeError(self.stopped if in_time else f"waited {PATIENCE:.0f} s in vain for {what}")


class Group:
    """Group of ranks, with the collectives that some but not all of them have begun."""

    def __init__(self, threads: Threads, ranks: Sequence[int]):
        self.threads, self.ranks = threads, list(ranks)
        self._calls: dict[int, Call] = {}

    def begin(self, number: int, place: int, signature: tuple, sent: torch.Tensor) -> Call:
        """Join the group's `number`-th collective. Raises AssertionError if other ranks have begun another one."""
        with self.threads.changing:
            if self.threads.stopped:
                raise RuntimeError(self.threads.stopped)
            call = self._calls.setdefault(number, Call(self, signature))
            if call.signature != signature:
                other = self.ranks[next(iter(call.parts))]
                difference = f"rank {self.ranks[place]} began {signature}, rank {other} {call.signature}"
                self.threads.stop(f"ranks differ in their collectives: {difference}")
                raise AssertionError(self.threads.stopped)
            call.parts[place] = sent.detach().clone()
            if call.is_complete:
                del self._calls[number]
                self.threads.arrived()
        return call


class Call:
    """One collective, with the tensor that each rank has sent, by its place in the group."""

    def __init__(self, group: Group, signature: tuple):
        self.group, self.signature = group, signature
        self.parts: dict[int, torch.Tensor] = {}

    @property
    def is_complete(self) -> bool:
        return len(self.parts) == len(self.group.ranks)

    def wait(self, place: int) -> list[torch.Tensor]:
        """Wait on behalf of the rank in this place, and return the tensors that were sent, in rank order."""
        self.group.threads.wait_for(self.group.ranks[place], lambda: self.is_complete, str(self))
        return [self.parts[place] for place in range(len(self.group.ranks))]

    def __str__(self) -> str:
        begun = [self.group.ranks[place] for place in sorted(self.parts)]
        return f"{self.signature[0]!r} among ranks {self.group.ranks}, begun by {begun}"


class Work:
    """Handle of a collective in flight, like torch.distributed's `Work`."""

    def __init__(self, call: Call, place: int, receive: Callable[[list[torch.Tensor]], None]):
        self._call, self._place, self._receive = call, place, receive

    def is_completed(self) -> bool:
        return self._call.is_complete

    def wait(self) -> bool:
        self._receive(self._call.wait(self._place))
        self._receive = lambda parts: None
        return True


class ThreadComms(Comms):
    """Comms of one rank along an axis."""

    def __init__(self, threads: Threads, ranks: Sequence[int], rank: int, axis: str = "replica", number: int = 0):
        super().__init__(None, axis=axis)
        self.is_gloo = True
        self.threads, self.number = threads, number
        self.size, self.rank = len(ranks), list(ranks).index(rank)
        self._group = threads.group(axis, number, ranks)
        self._begun = self._made = 0

    def start_work(self, what: str, sent: float, collective: Callable[..., dist.Work], *tensors: Any) -> Work:
        self.traffic.bytes += sent
        mine, outputs, receive = INTO[collective](self.rank, self.size, *tensors)
        self._begun += 1
        signature = (what, collective.__name__, tuple(mine.shape), mine.dtype)
        try:
            call = self._group.begin(self._begun, self.rank, signature, mine)
        except RuntimeError as error:
            raise self.failure(what, error) from error
        for output in outputs:
            output.fill_(torch.nan if output.is_floating_point() else torch.iinfo(output.dtype).max)
        return Work(call, self.rank, receive)

    def open_exchange(self, what: str, part_bytes: int) -> CollectiveExchange:
        return CollectiveExchange(self, what, part_bytes)

    def among(self, lists: Sequence[Sequence[int]], rank: int, axis: str, timeout_seconds: float) -> Comms:
        self._made += 1
        mine = [ranks for ranks in lists if len(ranks) > 1 and rank in ranks]
        return ThreadComms(self.threads, mine[-1], rank, axis, self._made) if mine else Comms(None, axis=axis)

    def failure(self, what: str, error: Exception) -> TrainingError:
        return TrainingError(f"{what} over the {self.axis} axis failed on {self.axis} {self.rank}: {error}")


Receiving = tuple[torch.Tensor, Sequence[torch.Tensor], Callable[[list[torch.Tensor]], None]]
"""Tensor that a rank sends, tensors in which it receives, and function that fills these from all sent tensors."""


def _all_reduce(rank: int, size: int, tensor: torch.Tensor) -> Receiving:
    def receive(parts: list[torch.Tensor]) -> None:
        tensor.copy_(parts[0])
        for part in parts[1:]:
            tensor.add_(part)

    return tensor, [tensor], receive


def _all_gather(rank: int, size: int, output: torch.Tensor, tensor: torch.Tensor) -> Receiving:
    def receive(parts: list[torch.Tensor]) -> None:
        output.copy_(torch.cat(parts))

    return tensor, [output], receive


def _all_to_all(rank: int, size: int, output: torch.Tensor, tensor: torch.Tensor) -> Receiving:
    def receive(parts: list[torch.Tensor]) -> None:
        output.copy_(torch.cat([part.chunk(size)[rank] for part in parts]))

    return tensor, [output], receive


INTO = {dist.all_reduce: _all_reduce, ALL_GATHER: _all_gather, dist.all_to_all_single: _all_to_all}


def on_each(world: int, fn: Callable[..., Any], *args: Any, comms: type[ThreadComms] = ThreadComms) -> list:
    """Call `fn(comms, *args)` on each of `world` ranks, with comms over all of them, and return the results by rank."""
    threads = Threads(world)
    return threads.run(lambda rank: fn(comms(threads, range(world), rank), *args))


def simulate(scenario: Scenario) -> Trace:
    """Run a scenario with `llmtrain.sync`, on one thread per rank of its mesh, and return the trace."""
    threads = Threads(scenario.replicas * scenario.shard)
    answers = threads.run(
        lambda rank: fake_engine.train(scenario, *threads.axes(rank, scenario.replicas, scenario.shard))
    )
    return fake_engine.trace_of(scenario, answers)
