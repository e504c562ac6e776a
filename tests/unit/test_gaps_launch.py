"""What mutants of the launcher, the meeting of ranks and the command line showed to be untested."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from llmtrain import launch
from llmtrain.cli import main
from llmtrain.config import ParallelSection
from llmtrain.errors import DONE, FAILED, DataError, RecipeError, TrainingError, UnavailableError, exit_with_status
from llmtrain.launch import node_rendezvous
from llmtrain.launch.attempts import NodeExit
from llmtrain.launch.node_rendezvous import NodeRendezvous
from llmtrain.parallel import roll_call
from llmtrain.parallel.comms import Comms, is_lost_peer
from llmtrain.parallel.network import Networks, unused_port
from llmtrain.parallel.rendezvous import RankInfo, Rendezvous, check_connectivity, job_prefix, rendezvous
from llmtrain.parallel.roll_call import gather_over_store
from llmtrain.parallel.world import World
from tests.unit.test_launch import Meeting as Launchers


@pytest.fixture
def meeting_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(unused_port()))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


def errors_of(ranks: int, do: Callable[[World], object]) -> list[Exception | None]:
    """What `do` raised on each rank, all of them threads of this process."""

    def attend(rank: int) -> Exception | None:
        try:
            do(World(rank, ranks, 0, 1))
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(attend, range(ranks)))


@pytest.mark.usefixtures("meeting_point")
def test_every_rank_hears_why_one_can_not_take_part() -> None:
    def no_gpu() -> float:
        raise RecipeError("there is no such GPU")

    errors = errors_of(2, lambda world: rendezvous(world, ParallelSection(), no_gpu if world.rank else lambda: 1.0, 20))
    assert [type(error) for error in errors] == [RecipeError] * 2
    assert all(str(error).startswith("there is no such GPU (rank 1 on ") for error in errors)


def test_a_single_process_hears_at_once_why_it_can_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gpu() -> float:
        raise RecipeError("there is no such GPU")

    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RecipeError, match=r"^there is no such GPU$"):
        rendezvous(World(0, 1, 0, 1), ParallelSection(), no_gpu, 20)


@pytest.fixture
def agents_store(meeting_point: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.TCPStore]:
    """The store of a torchrun agent, which outlives its ranks."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    yield dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)


def come(world: World, timeout_seconds: float = 20) -> Rendezvous:
    return rendezvous(world, ParallelSection(), lambda: float(world.rank), timeout_seconds)


@pytest.mark.usefixtures("agents_store")
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_are_started_again_do_not_meet_those_of_an_earlier_start(ranks: int) -> None:
    assert errors_of(2, come) == [None] * 2
    with pytest.raises(TrainingError, match=r"^ranks? 1"):
        come(World(0, ranks, 0, 1), 1.0)


@pytest.mark.parametrize("earlier", ["complete", "without rank 1", "begun"])
def test_a_rank_that_is_faster_than_rank_0_leaves_an_earlier_start(
    monkeypatch: pytest.MonkeyPatch, agents_store: dist.TCPStore, earlier: str
) -> None:
    if earlier == "complete":
        assert errors_of(2, come) == [None] * 2
    elif earlier == "without rank 1":
        with pytest.raises(TrainingError, match=r"^rank 1 of 2"):
            come(World(0, 2, 0, 1), 1.0)
    else:  # rank 0 has ended before it told anything
        dist.PrefixStore(job_prefix(World(0, 2, 0, 1)), agents_store).set(roll_call.START, "earlier")
    has_looked = threading.Event()

    def watched(look: Callable) -> Callable:
        def looking(store: dist.Store, *arguments: object) -> object:
            if arguments[0] != [roll_call.START]:  # the first wait, before a name is known
                has_looked.set()
            return look(store, *arguments)

        return looking

    for name in ("_read_answers", "_wait"):
        monkeypatch.setattr(roll_call, name, watched(getattr(roll_call, name)))

    def meet(world: World) -> Rendezvous:
        assert world.rank or has_looked.wait(20)
        return come(world)

    assert errors_of(2, meet) == [None] * 2


@pytest.mark.usefixtures("agents_store")
def test_ranks_that_wait_for_rank_0_in_vain_name_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "GRACE_SECONDS", 0.1)
    with ThreadPoolExecutor(2) as pool:
        coming = [pool.submit(come, World(rank, 4, 0, 1), 1.0) for rank in (1, 3)]
    for one in coming:
        assert str(one.exception()).startswith("ranks 0, 2 of 4 did not answer the roll call at the start")
        assert f"only ranks 1, 3 on {socket.gethostname()}" in str(one.exception())


@pytest.mark.usefixtures("agents_store")
@pytest.mark.parametrize("numbered_by", ["Slurm", "hand"])
def test_ranks_of_two_slurm_steps_are_not_of_one_run_unless_they_are_numbered_by_hand(
    monkeypatch: pytest.MonkeyPatch, numbered_by: str
) -> None:
    step = threading.local()

    def come_in_a_step(world: World) -> Rendezvous:
        step.of_rank = str(world.rank)
        return come(world, 20 if numbered_by == "hand" else 1.0)

    monkeypatch.delenv("RANK", raising=False)
    if numbered_by == "hand":
        monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("llmtrain.parallel.rendezvous.slurm_step", lambda: step.of_rank)
    monkeypatch.setattr(roll_call, "GRACE_SECONDS", 0.1)
    errors = errors_of(2, come_in_a_step)
    if numbered_by == "hand":
        assert errors == [None] * 2
    else:
        for rank, error in enumerate(errors):
            assert str(error).startswith(f"rank {1 - rank} of 2 did not answer")


@pytest.mark.usefixtures("meeting_point")
def test_ranks_that_lose_the_store_in_a_roll_call_say_where_it_was() -> None:
    class Lost:
        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("connection\nreset")

    with pytest.raises(TrainingError) as lost:
        gather_over_store(Lost(), World(1, 2, 0, 1), "after a pause", None, 20)
    where = f"127.0.0.1:{os.environ['MASTER_PORT']}"
    assert f"lost the store at {where} in the roll call after a pause: connection" in str(lost.value)
    assert str(lost.value).startswith(f"rank 1 on {socket.gethostname()} ") and "\n" not in str(lost.value)


@pytest.mark.usefixtures("meeting_point")
@pytest.mark.parametrize(("replicas", "shard", "axis"), [(3, 1, "replica"), (1, 3, "shard")])
def test_ranks_try_the_way_to_their_peers_on_other_hosts(replicas: int, shard: int, axis: str) -> None:
    def told(hosts: list[str]) -> list[Exception | None]:
        places = [RankInfo(f"{host}:{rank}", host, None, 1.0) for rank, host in enumerate(hosts)]
        meeting = Rendezvous(dist.HashStore(), places, Networks("lo", "lo"))
        return errors_of(3, lambda world: check_connectivity(meeting, world, replicas, shard, 20))

    assert told(["one", "one", "one"]) == [None] * 3, "loopback will do between launchers on one host"
    errors = told(["one", "two", "three"])
    assert [type(error) for error in errors] == [TrainingError] * 3
    for error in errors:
        assert str(error).startswith(
            "rank 0 on one (lo, 127.0.0.1) does not reach rank 1 on two (lo, 127.0.0.1): loopback"
        )
        assert f"parallel.{axis}_network" in str(error) and "nor do 2 other ranks" in str(error)


@pytest.mark.usefixtures("meeting_point")
def test_hosts_of_the_same_name_do_not_take_their_own_loopback_for_each_other() -> None:
    places = [RankInfo(f"one:{rank}", "one", None, 1.0, network=f"stack {rank}") for rank in range(2)]
    meeting = Rendezvous(dist.HashStore(), places, Networks("lo", "lo"))
    for error in errors_of(2, lambda world: check_connectivity(meeting, world, 2, 1, 20)):
        assert "rank 0 on one (lo, 127.0.0.1) does not reach rank 1 on one (lo, 127.0.0.1): loopback" in str(error)


def test_nobody_waits_again_for_a_launcher_that_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_rendezvous, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(node_rendezvous, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(node_rendezvous, "PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(node_rendezvous, "SILENCE_SECONDS", 1.0)

    def attend(call: NodeRendezvous) -> list[dict[int, NodeExit]] | None:
        if call.nodes.rank == 1:
            return None  # leaves
        told = [call.exchange_exits(0, NodeExit(FAILED), True)]
        monkeypatch.setattr(node_rendezvous, "SILENCE_SECONDS", 600.0)
        return [*told, call.exchange_exits(1, NodeExit(DONE), True)]

    first, _ = Launchers().hold([0, 1], 2, attend)
    assert first == [{0: NodeExit(FAILED)}, {0: NodeExit(DONE)}]


@pytest.mark.parametrize("code", [0, 3])
def test_launch_leaves_with_the_code_of_its_ranks(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(launch, "launch_torchrun", lambda recipe, overrides: code)
    with pytest.raises(SystemExit) as left:
        main(["launch", "recipe.yaml"])
    assert left.value.code == code


@pytest.mark.parametrize(("error", "code"), [(DataError, 2), (UnavailableError, 1), (TrainingError, 1)])
def test_what_may_work_later_ends_with_the_code_that_is_tried_again(error: type[Exception], code: int) -> None:
    def fail() -> None:
        raise error("no text")

    with pytest.raises(SystemExit) as left:
        exit_with_status(fail)
    assert left.value.code == code


@pytest.mark.parametrize(
    ("variables", "speaks"),
    [
        ({}, True),
        ({"SLURM_LOCALID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, True),
        ({"SLURM_LOCALID": "1", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, False),
    ],
)
def test_a_rank_speaks_for_its_host_if_it_is_the_first_by_all_launchers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, variables: dict[str, str], speaks: bool
) -> None:
    for name in ("RANK", "LOCAL_RANK", "SLURM_LOCALID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"LOCAL_RANK": "0", **variables}.items():
        monkeypatch.setenv(name, value)

    def fail() -> None:
        raise DataError("no data")

    with pytest.raises(SystemExit) as left:
        exit_with_status(fail)
    assert left.value.code == 2
    assert capsys.readouterr().err == ("error: no data\n" if speaks else "")


NCCL_SAYS = """NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.29.3
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 2 'out of memory'"""


@pytest.mark.parametrize(
    ("said", "reason", "is_lost"),
    [
        ("NCCL error\nLast error:\nsocket closed", "NCCL error Last error: socket closed", True),
        (NCCL_SAYS, " ".join(NCCL_SAYS.split()), False),
        ("ncclInvalidUsage: This usually reflects invalid usage of NCCL library.", None, False),
        ("NCCL timeout\n" + 100 * "frame of C++\n", ("NCCL timeout " + 100 * "frame of C++ ")[:400], True),
    ],
    ids=["lost", "out of memory", "invalid usage", "stack"],
)
def test_what_nccl_says_last_is_shown_and_only_a_lost_peer_is_called_one(
    monkeypatch: pytest.MonkeyPatch, said: str, reason: str | None, is_lost: bool
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    error = dist.DistBackendError(said)
    failure = str(Comms(None).failure("averaging block 2", error))
    lost = "; a peer died or took longer than run.timeout_seconds" if is_lost else ""
    assert failure.endswith(f" on {socket.gethostname()}: {reason or said}{lost}")
    assert is_lost_peer(error) == is_lost


def test_a_collective_that_can_not_begin_says_what_it_was_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer [192.0.2.1]:4711\nand more")

    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    with pytest.raises(TrainingError) as failed:
        Comms(None, axis="replica").start_work("averaging block 2", 0.0, refuse)
    assert str(failed.value) == (
        f"averaging block 2 over the replica axis failed on rank 3 (replica 0 of 1) on {socket.gethostname()}: "
        "Connection closed by peer [192.0.2.1]:4711 and more; a peer died or took longer than run.timeout_seconds"
    )


@pytest.mark.parametrize(
    ("exchange", "collective"),
    [("all_gather_object", "all_gather_object"), ("broadcast_object", "broadcast_object_list")],
)
def test_an_exchange_of_objects_that_fails_says_what_it_was_for(
    monkeypatch: pytest.MonkeyPatch, exchange: str, collective: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("Timed out waiting 2000ms for recv operation to complete\nand more")

    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, collective, refuse)
    comms = Comms(None, axis="world")
    comms.rank, comms.size = 1, 2
    with pytest.raises(TrainingError) as failed:
        getattr(comms, exchange)("mine", "comparing token shards")
    assert str(failed.value) == (
        f"comparing token shards over the world axis failed on rank 1 (world 1 of 2) on {socket.gethostname()}: "
        "Timed out waiting 2000ms for recv operation to complete and more; a peer died or took longer than run.timeout_seconds"
    )


def test_zero_without_deepspeed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.delitem(sys.modules, "llmtrain.parallel.zero", raising=False)
    with pytest.raises(
        RecipeError, match=r"^parallel.engine=zero needs DeepSpeed, .*: pip install -c constraints.txt -e '.\[zero\]'$"
    ):
        importlib.import_module("llmtrain.parallel.zero")
