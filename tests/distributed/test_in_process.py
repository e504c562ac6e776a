"""Tests of replicas in one process. They give the same bits as processes that send messages, up to the order of additions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from llmtrain.parallel.in_process import InProcess
from llmtrain.parallel.world import World
from tests.distributed.fake_engine import choices, edit
from tests.distributed.pool import RankPool
from tests.distributed.real_engine import GPT_NEO, TIED, Case, Outcome, Run, train

PENALTY = {"z": 2.0, "temperature": 1.0, "clip": 0.5}
DROPOUT = {"attention_dropout": 0.2, "resid_dropout": 0.2, "embed_dropout": 0.2}


def process_of(replicas: int) -> InProcess:
    """Return replicas of this process, which already has a process group of its own."""
    process = InProcess(replicas, timeout_seconds=60)
    process.shard_mesh = DeviceMesh.from_group(dist.group.WORLD, process.device.type, mesh_dim_names=("shard",))
    return process


def train_in_process(case: Case) -> list[Outcome]:
    """Run a case with all of its replicas in this process. Return the outcomes by replica."""
    process = process_of(case.replicas)

    def of_replica(rank: int) -> Outcome:
        torch.manual_seed(rank)  # for dropout
        with process.open_mesh(World(rank, case.replicas, rank, case.replicas)) as mesh:
            run = Run(case, mesh)
            run.train(case.steps)
            return run.finish()

    return process.turns.run(of_replica)


def train_as_process(case: Case) -> Outcome:
    """Run a case on this rank of several processes."""
    torch.manual_seed(dist.get_rank())
    return train([case])[0]


def both(ranks: RankPool, case: Case) -> list[tuple[Outcome, Outcome]]:
    """Return the outcomes of each replica: in one process, and as a process of its own."""
    [ours] = ranks.run(train_in_process, case, world_size=1)
    return list(zip(ours, ranks.run(train_as_process, case, world_size=case.replicas), strict=True))


def assert_same(ours: Outcome, theirs: Outcome) -> None:
    """Check that two outcomes are equal to the last bit."""
    assert (ours.losses, ours.norms, ours.rounds) == (theirs.losses, theirs.norms, theirs.rounds)
    for name, weight in theirs.weights.items():
        assert torch.equal(ours.weights[name], weight), name


def overlapped(method: str, **changes: Any) -> Any:
    return choices(method, schedule={"kind": "overlapped", "steps": 2, "fragments": 2}, **changes)


TWO = {
    "synchronous": Case(replicas=2),
    "gradients as bf16": Case(choices("synchronous", wire={"kind": "bf16", "gradients": True}), 2, model=TIED),
    "local_sgd, dropout": Case(
        choices("local_sgd", every=2),
        2,
        model=GPT_NEO.model_copy(update={"config": {**GPT_NEO.config, **DROPOUT}}),
    ),
    "diloco, int4, bf16": Case(
        choices("diloco", every=2, wire={"kind": "int4", "error_feedback": True}), 2, parallel={"precision": "bf16"}
    ),
    "edit, layer-wise": Case(edit(every=2, penalty=PENALTY), 2),
    "streaming_diloco": Case(choices("streaming_diloco", every=4), 2),
    "co2": Case(choices("co2", every=2), 2),
    "palsgd": Case(choices("palsgd", every=2), 2),
    "muloco": Case(choices("muloco", every=2), 2, optim={"lr": 1e-2, "kind": "muon"}),
    "sparseloco": Case(choices("sparseloco", every=2, wire={"kind": "topk", "keep": 64}), 2),
    "compiled": Case(choices("diloco", every=2), 2, parallel={"precision": "fp32", "compile": True}),
}
SLOW = ("compiled", "gradients as bf16", "co2", "palsgd", "sparseloco")
"""Cases that take long, or whose collectives another case has."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.deep if name in SLOW else ()) for name in TWO])
def test_two_replicas_of_a_process_train_like_two_processes(ranks: RankPool, name: str) -> None:
    outcomes = both(ranks, TWO[name])
    for ours, theirs in outcomes:
        assert_same(ours, theirs)


@pytest.mark.parametrize("wire", ["int4", *(pytest.param(wire, marks=pytest.mark.deep) for wire in ("bf16", "int8"))])
def test_four_replicas_get_the_bits_of_processes_if_messages_are_rounded(ranks: RankPool, wire: str) -> None:
    case = Case(choices("diloco", every=2, wire={"kind": wire}), 4)
    for ours, theirs in both(ranks, case):
        assert_same(ours, theirs)


def test_sums_of_four_differ_from_those_of_processes_by_their_order_only(ranks: RankPool) -> None:
    case = Case(choices("diloco", every=2), 4, parallel={"precision": "fp64"})
    outcomes = both(ranks, case)
    for ours, theirs in outcomes:
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-14, abs=0)
        for name, weight in theirs.weights.items():
            torch.testing.assert_close(ours.weights[name], weight, rtol=0, atol=1e-14)
    for ours, _ in outcomes[1:]:
        assert all(torch.equal(ours.weights[name], weight) for name, weight in outcomes[0][0].weights.items())


def fail_in_one(step: int) -> str:
    """Return the error of a process in which one replica fails while others wait for it."""
    process, case = process_of(3), Case(choices("diloco", every=2), 3, global_batch=6)

    def of_replica(rank: int) -> None:
        with process.open_mesh(World(rank, 3, rank, 3)) as mesh:
            run = Run(case, mesh)
            run.train(step)
            if rank == 1:
                raise ValueError("replica 1 has had enough")
            run.train(case.steps)

    try:
        process.turns.run(of_replica)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("step", [0, 1, 4])
def test_a_replica_that_fails_ends_the_others(ranks: RankPool, step: int) -> None:
    assert ranks.run(fail_in_one, step, world_size=1) == ["replica 1 has had enough"]


def differ_in_a_collective() -> str:
    process = process_of(2)

    def of_replica(rank: int) -> None:
        with process.open_mesh(World(rank, 2, rank, 2)) as mesh:
            mesh.replica_comms.all_reduce(torch.zeros(3 + rank), "averaging")

    try:
        process.turns.run(of_replica)
    except Exception as error:
        return str(error)
    return "no error"


def test_replicas_that_begin_different_collectives_are_told_so(ranks: RankPool) -> None:
    [said] = ranks.run(differ_in_a_collective, world_size=1)
    assert "averaging over the replica axis failed on replica 1 of 2 in one process: other replicas began" in said
    assert "(3,)" in said and "(4,)" in said


def test_bytes_count_as_if_they_were_sent(ranks: RankPool) -> None:
    case = replace(TWO["diloco, int4, bf16"], steps=4)
    [ours] = ranks.run(bytes_in_process, case, world_size=1)
    assert ours == ranks.run(bytes_as_process, case, world_size=2) and ours[0] > 0


def bytes_as_process(case: Case) -> float:
    from tests.distributed.real_engine import mesh_of

    run = Run(case, mesh_of(case.replicas, case.shard))
    run.train(case.steps)
    return run.mesh.replica_comms.traffic.bytes


def bytes_in_process(case: Case) -> list[float]:
    process = process_of(case.replicas)

    def of_replica(rank: int) -> float:
        with process.open_mesh(World(rank, case.replicas, rank, case.replicas)) as mesh:
            Run(case, mesh).train(case.steps)
            return mesh.replica_comms.traffic.bytes

    return process.turns.run(of_replica)
