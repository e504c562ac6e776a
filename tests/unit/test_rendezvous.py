"""The meeting of ranks at a start: the roll call, missing ranks, ranks of an earlier start, and connections between hosts."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch.distributed as dist

from llmtrain.config import ParallelSection
from llmtrain.consistency import MAX_NAMED, PER_HOST_KEYS, common_values, digest_of_values, inconsistency
from llmtrain.errors import DataError, RecipeError, TrainingError
from llmtrain.parallel import roll_call
from llmtrain.parallel.network import Networks, unused_port
from llmtrain.parallel.rendezvous import Peers, RankInfo, check_connectivity, find_peers, job_prefix
from llmtrain.parallel.roll_call import gather_over_store
from llmtrain.parallel.world import World
from llmtrain.recipe_loader import load_recipe
from llmtrain.train import run
from tests.end_to_end.runs import RECIPE, ROOT


@pytest.fixture
def meeting_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(unused_port()))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


def errors_of(ranks: int, do: Callable[[World], object]) -> list[Exception | None]:
    """Return the error, if any, that `do` raises on each rank. Ranks are threads of this process."""

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

    errors = errors_of(2, lambda world: find_peers(world, ParallelSection(), no_gpu if world.rank else lambda: 1.0, 20))
    assert [type(error) for error in errors] == [RecipeError] * 2
    assert all(str(error).startswith("there is no such GPU (rank 1 on ") for error in errors)


@pytest.mark.usefixtures("meeting_point")
def test_a_rank_waits_for_slower_ones_without_warnings_of_torch(capfd: pytest.CaptureFixture[str]) -> None:
    def come_late(world: World) -> None:
        time.sleep(world.rank / 2)
        come(world)

    assert errors_of(3, come_late) == [None] * 3
    assert "waitForInput" not in capfd.readouterr().err


@pytest.mark.usefixtures("meeting_point")
def test_every_rank_hears_that_one_host_has_a_wrong_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMTRAIN_SHARE_GPU", "yes")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    errors = errors_of(2, come)
    assert all("LLMTRAIN_SHARE_GPU='yes'" in str(error) and "(rank 0 on " in str(error) for error in errors), errors


@pytest.mark.usefixtures("meeting_point")
def test_ranks_that_take_several_hosts_for_one_are_refused_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without LOCAL_RANK and LOCAL_WORLD_SIZE all ranks count as those of one host, which may lack GPUs for so many."""

    def no_gpu() -> float:
        raise RecipeError("4 processes on a machine with 1 GPU")

    def meet(world: World) -> Peers:
        name.of_rank = f"pod-{world.rank // 2}:"
        return find_peers(World(world.rank, 4, world.rank, 4), ParallelSection(), no_gpu, 20)

    name = threading.local()
    monkeypatch.setattr("llmtrain.parallel.rendezvous.node_name", lambda: name.of_rank)
    errors = errors_of(4, meet)
    assert {type(error) for error in errors} == {RecipeError}
    says = f"rank 0 on {socket.gethostname()} counts 4 ranks on its host, where 2 of 4 are; give each rank LOCAL_RANK and LOCAL_W"
    assert all(str(error).startswith(says) for error in errors), errors


@pytest.mark.usefixtures("meeting_point")
def test_ranks_with_other_recipes_or_versions_are_refused_on_all_in_one_line() -> None:
    def meet_with(*given: dict[str, str]) -> list[Exception | None]:
        def meet(world: World) -> Peers:
            return find_peers(world, ParallelSection(), lambda: 1.0, 20, given[world.rank])

        return errors_of(3, meet)

    usual, host = {"torch": "2.13.0", "optim.lr": "0.001"}, socket.gethostname()
    assert meet_with(usual, usual, usual) == [None] * 3
    errors = meet_with(usual, {**usual, "optim.lr": "0.002", "sync.outer.lr": "1.0"}, usual)
    assert {type(error) for error in errors} == {RecipeError}
    assert {str(error).partition("; start the same command, ")[0] for error in errors} == {
        f"ranks have different recipes or versions: optim.lr is 0.001 for ranks 0, 2 on {host}, 0.002 for rank 1 on {host}; "
        f"sync.outer.lr is not given for ranks 0, 2 on {host}, 1.0 for rank 1 on {host}"
    }


def test_values_of_a_host_are_not_compared_and_few_are_named() -> None:
    given = [
        common_values(load_recipe(ROOT / RECIPE, overrides))
        for overrides in ([], [f"{key}=1" if key == "data.num_proc" else f"{key}=a" for key in PER_HOST_KEYS[:-1]])
    ]
    assert (
        digest_of_values(given[0]) == digest_of_values(given[1])
        and {"llmtrain", "torch", "run.restarts"} <= given[0].keys()
    )
    names = [str(number) for number in range(MAX_NAMED + 2)]
    assert inconsistency([dict.fromkeys(names, "a"), dict.fromkeys(names, "b")], str).endswith("[1]; and 2 more")


@pytest.mark.usefixtures("meeting_point")
def test_a_run_compares_the_recipes_of_its_ranks() -> None:
    recipes = [load_recipe(ROOT / RECIPE, [f"optim.lr={rate}"]) for rate in (0.001, 0.002)]
    errors = errors_of(2, lambda world: run._ranks_of(recipes[world.rank], world).find_peers(lambda world: 1.0))
    assert all("versions: optim.lr is 0.001 for rank 0 on " in str(error) for error in errors), errors


@pytest.mark.usefixtures("meeting_point")
def test_a_suite_is_looked_for_where_it_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 evaluates. Other hosts do not need the suite's data, but their ranks are told if rank 0 lacks it."""

    def lacks_data(section: object) -> None:
        raise DataError("eval.suite.data_dir a has no b")

    monkeypatch.setattr(run, "check_suite_data", lacks_data)
    recipe = load_recipe(ROOT / RECIPE, ["eval.suite=small"])
    assert run._usable_memory(recipe, World(1, 2, 1, 2)) > 0
    errors = errors_of(2, lambda world: run._ranks_of(recipe, world).find_peers(partial(run._usable_memory, recipe)))
    assert {str(error) for error in errors} == {f"eval.suite.data_dir a has no b (rank 0 on {socket.gethostname()})"}


def test_a_single_process_hears_at_once_why_it_can_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gpu() -> float:
        raise RecipeError("there is no such GPU")

    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RecipeError, match=r"^there is no such GPU$"):
        find_peers(World(0, 1, 0, 1), ParallelSection(), no_gpu, 20)


@pytest.fixture
def agents_store(meeting_point: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.TCPStore]:
    """Yield the store of a torchrun agent, which outlives the agent's ranks."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    yield dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)


def come(world: World, timeout_seconds: float = 20) -> Peers:
    return find_peers(world, ParallelSection(), lambda: float(world.rank), timeout_seconds)


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
    else:  # rank 0 has ended after it named the start
        dist.PrefixStore(job_prefix(World(0, 2, 0, 1)), agents_store).set(roll_call.START, "earlier")
    has_looked = threading.Event()

    name = (
        "_answer" if earlier == "begun" else "_read_answers"
    )  # there is nothing to read in a start that has only begun
    look = getattr(roll_call, name)

    def watched(*arguments: object) -> object:
        has_looked.set()
        return look(*arguments)

    monkeypatch.setattr(roll_call, name, watched)

    def meet(world: World) -> Peers:
        assert world.rank or has_looked.wait(20)
        return come(world)

    assert errors_of(2, meet) == [None] * 2


@pytest.mark.usefixtures("agents_store")
def test_ranks_that_wait_for_rank_0_in_vain_name_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "GRACE_SECONDS", 0.1)
    with ThreadPoolExecutor(2) as pool:
        coming = [pool.submit(come, World(rank, 4, 0, 1), 3.0) for rank in (1, 3)]
    for one in coming:
        assert str(one.exception()).startswith("ranks 0, 2 of 4 did not answer the roll call at the start")
        assert f"only ranks 1, 3 on {socket.gethostname()}" in str(one.exception())


@pytest.mark.usefixtures("agents_store")
@pytest.mark.parametrize("numbered_by", ["Slurm", "hand"])
def test_ranks_of_two_slurm_steps_are_not_of_one_run_unless_they_are_numbered_by_hand(
    monkeypatch: pytest.MonkeyPatch, numbered_by: str
) -> None:
    step = threading.local()

    def come_in_a_step(world: World) -> Peers:
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
        peers = Peers(dist.HashStore(), places, Networks("lo", "lo"))
        return errors_of(3, lambda world: check_connectivity(peers, world, replicas, shard, 20))

    assert told(["one", "one", "one"]) == [None] * 3, "loopback will do between launchers on one host"
    errors = told(["one", "two", "three"])
    assert [type(error) for error in errors] == [TrainingError] * 3
    for error in errors:
        assert str(error).startswith(
            "rank 0 on one (lo, 127.0.0.1) does not reach rank 1 on two (lo, 127.0.0.1): loopback"
        )
        assert f"parallel.{axis}_network" in str(error) and "2 more ranks can't reach a peer" in str(error)


@pytest.mark.usefixtures("meeting_point")
def test_a_rank_that_still_prepares_data_is_awaited_in_a_roll_call_that_says_so() -> None:
    peers = Peers(dist.HashStore(), [RankInfo("a", "a", None, 1.0)] * 2, Networks())
    with pytest.raises(
        TrainingError, match=r"^rank 1 of 2 did not answer the roll call after the preparation of data at"
    ):
        check_connectivity(peers, World(0, 2, 0, 1), 2, 1, 0.01)


@pytest.mark.usefixtures("meeting_point")
def test_hosts_of_the_same_name_do_not_take_their_own_loopback_for_each_other() -> None:
    places = [RankInfo(f"one:{rank}", "one", None, 1.0, network=f"stack {rank}") for rank in range(2)]
    peers = Peers(dist.HashStore(), places, Networks("lo", "lo"))
    for error in errors_of(2, lambda world: check_connectivity(peers, world, 2, 1, 20)):
        assert "rank 0 on one (lo, 127.0.0.1) does not reach rank 1 on one (lo, 127.0.0.1): loopback" in str(error)
