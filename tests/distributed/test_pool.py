"""Tests of the pool of ranks itself: a test that fails on a rank must fail in pytest, name the rank, and never hang."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import pool as pools
from tests.distributed.pool import RankFailure, RankPool
from tests.mother import LARGEST_REQUEST, Mother, check_forkable


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Yield a pool of two ranks for these tests alone, which kill ranks."""
    pool = RankPool(2)
    yield pool
    pool.close()


def summed(values: torch.Tensor) -> torch.Tensor:
    total = values + dist.get_rank()
    dist.all_reduce(total)
    return total


def ranks_and_pids() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("the reason")
    dist.barrier()


def exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def skip_collective_on(rank: int) -> None:
    if dist.get_rank() != rank:
        dist.barrier()
    else:
        time.sleep(60)


def test_ranks_meet_and_answer_in_order(pool: RankPool) -> None:
    results = pool.run(summed, torch.ones(3))
    assert [result.tolist() for result in results] == [[3.0] * 3] * 2


def test_the_same_processes_serve_smaller_worlds(pool: RankPool) -> None:
    both = pool.run(ranks_and_pids)
    assert [answer[:2] for answer in both] == [(0, 2), (1, 2)]
    assert pool.run(ranks_and_pids, world_size=1) == [(0, 1, both[0][2])]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_names_its_rank_and_the_pool_goes_on(
    pool: RankPool, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "GRACE_SECONDS", 60.0)
    before = pool.run(ranks_and_pids)
    with pytest.raises(RankFailure, match=rf"(?s)rank {rank}: Traceback.*raise_on.*ValueError: the reason"):
        pool.run(raise_on, rank)
    assert pool.run(ranks_and_pids) == before


def test_an_argument_that_cannot_be_rebuilt_is_the_ranks_error(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="will not come back"):
        pool.run(print, Unloadable())
    assert len(pool.run(ranks_and_pids)) == 2


def test_a_rank_that_dies_is_named_and_replaced(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="rank 1: died with exit code 7"):
        pool.run(exit_on, 1, timeout=60)
    assert [answer[:2] for answer in pool.run(ranks_and_pids)] == [(0, 2), (1, 2)]


def test_a_rank_that_hangs_is_named_and_replaced(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="rank 1: no answer in time"):
        pool.run(sleep_on, 1, timeout=9)
    assert [answer[:2] for answer in pool.run(ranks_and_pids)] == [(0, 2), (1, 2)]


def test_a_collective_that_hangs_is_reported_with_its_traceback(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "GRACE_SECONDS", 0.1)  # how long the pool waits for the rank that never answers
    with pytest.raises(RankFailure, match=r"(?s)rank 0: Traceback.*skip_collective_on"):
        pool.run(skip_collective_on, 1, timeout=12)
    assert len(pool.run(ranks_and_pids)) == 2


def test_an_interrupted_call_leaves_no_answer_to_the_next(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception interrupts the pool while it waits, as one of pytest-timeout would."""
    pool.run(ranks_and_pids)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(pools.connection, "wait", interrupted)
        pool.run(summed, torch.ones(3))
    assert [answer[:2] for answer in pool.run(ranks_and_pids, timeout=60)] == [(0, 2), (1, 2)]


def test_ranks_have_the_environment_of_their_pool() -> None:
    pool = RankPool(1, {"ONLY_THERE": "1"}, own_mother=False)
    try:
        assert pool.run(os.getenv, "ONLY_THERE") == ["1"]
    finally:
        pool.close()


def test_a_mothers_own_environment_reaches_what_it_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    asking, answering = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mother = Mother({"OF_THE_MOTHER": "1", "OF_BOTH": "1"})
    monkeypatch.setattr(mother, "_connect", lambda: asking)
    with answering:
        for sent in (os.getpid(), (0, 0.0)):  # id of the forked process, then its end
            answering.send(pickle.dumps(sent))
        assert mother.fork(os.getpid, environment={"OF_BOTH": "2"}).wait() == 0
        request, descriptors, *_ = socket.recv_fds(answering, LARGEST_REQUEST, 3)
    for descriptor in descriptors:
        os.close(descriptor)
    _, environment, *_ = pickle.loads(request)
    assert (environment["OF_THE_MOTHER"], environment["OF_BOTH"]) == ("1", "2")


def test_an_import_after_which_no_process_can_be_forked_is_named() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        with pytest.raises(AssertionError, match=r"^this\.module started \d+ threads when it was imported"):
            check_forkable("this.module")
    finally:
        end.set()
        thread.join()


class Unloadable:
    def __reduce__(self) -> tuple:
        return (_refuse, ())


def _refuse() -> None:
    raise RuntimeError("will not come back")
