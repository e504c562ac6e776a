"""Tests of WAGMA on gloo ranks, which are late by chance or because they are slow."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from llmtrain.errors import TrainingError
from llmtrain.parallel.comms import Comms
from tests.distributed.fake_engine import Scenario, meeting_store
from tests.distributed.oracle_wagma import Case, ends_of_rounds
from tests.distributed.pool import RankPool
from tests.distributed.wagma_runs import Answer, Fault, history, is_the_oracles, train, wagma


def train_freely(case: Case) -> tuple[Answer, int, list[str]]:
    """Train on this rank, and return (its answer, number of keys left in the store, names of threads left)."""
    scenario = case.scenario
    axes = init_device_mesh("cpu", (scenario.replicas, scenario.shard), mesh_dim_names=("replica", "shard"))
    store = meeting_store()
    keys, threads = store.num_keys(), set(threading.enumerate())
    dist.barrier()
    answer = train(case, Comms(axes.get_group("replica")), Comms(axes.get_group("shard")), store)
    dist.barrier()  # the store is on the first rank
    left = [thread.name for thread in set(threading.enumerate()) - threads]
    answered = answer, store.num_keys() - keys, left
    dist.barrier()
    return answered


def check(ranks: RankPool, case: Case) -> list[Answer]:
    """Check that a run is the oracle's for the lateness that happened, and return the ranks' answers. It must leave no
    threads, and in the store only the keys of the iterations since the last global average and that of the end."""
    world = case.scenario.replicas * case.scenario.shard
    answers, keys, threads = zip(*ranks.run(train_freely, case, world_size=world, timeout=120), strict=True)
    is_the_oracles(case, history(case, list(answers)), list(answers))
    assert set(keys) == {case.iterations - 1 - ends_of_rounds(case.scenario)[-1] + 1}
    assert not any(threads), "a thread outlived finish()"
    return list(answers)


@pytest.mark.parametrize(("replicas", "shard", "size"), [(4, 1, 2), (4, 1, 4), (2, 2, 2)])
def test_running_freely(ranks: RankPool, replicas: int, shard: int, size: int) -> None:
    """Replica 1 is sure to be late in some iterations. All replicas may be late by chance."""
    sleeps = {replica: 0.004 for replica in range(replicas)}
    held = {(3, 1), (13, 1), (14, 1), (31, 1)}
    case = Case(Scenario(wagma(6, size), replicas, shard, steps=40), None, sleeps=sleeps, held=held)
    answers = check(ranks, case)
    assert all(answers[1 * shard].contributed[iteration] < iteration for iteration, _ in held)


def test_a_straggler_is_late(ranks: RankPool) -> None:
    """It is late in every group average, because it still computes when the others have continued."""
    held = {(iteration, 1) for iteration in range(17) if iteration % 5 != 4}
    answers = check(ranks, Case(Scenario(wagma(), 4, 1, steps=17), None, held=held))
    assert answers[1].late == len(held)


@pytest.mark.parametrize(("replicas", "shard", "failing"), [(4, 1, 0), (4, 1, 3), (2, 2, 3)])
def test_a_rank_that_raises_takes_the_others_down(ranks: RankPool, failing: int, replicas: int, shard: int) -> None:
    """They fail with a message about it within the sum of the timeouts. None of them hangs or ends normally."""
    case = Case(Scenario(wagma(), replicas, shard, steps=40), None, fault=(failing, 8), timeout_seconds=7.0)
    told = ranks.run(end_of, case, timeout=30)
    assert [rank for rank, message in enumerate(told) if message == "raised"] == [failing]
    others = told[:failing] + told[failing + 1 :]
    assert all("peer died" in message or "remote server" in message for message in others), others


def end_of(case: Case) -> str:
    """Train on this rank, and return how it ended: `raised`, `ended`, or the message of its TrainingError."""
    try:
        train_freely(case)
    except Fault:
        return "raised"
    except TrainingError as error:
        return str(error)
    return "ended"
