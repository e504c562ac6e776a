"""Choice of network interfaces and GPUs by each rank, and the interfaces that gloo and NCCL are told to use."""

import os
import socket
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from llmtrain.config import ParallelSection
from llmtrain.doctor.finding import Level
from llmtrain.doctor.machine import localhost
from llmtrain.errors import RecipeError, TrainingError
from llmtrain.launch import torchrun
from llmtrain.launch.nodes import Nodes
from llmtrain.machine_check import check_machine
from llmtrain.parallel.mesh import Mesh, local_device, open_process_mesh
from llmtrain.parallel.network import (
    GLOO,
    NCCL,
    Networks,
    address_of,
    address_towards,
    check_localhost,
    interface_of,
    using_interface,
)
from llmtrain.parallel.rendezvous import Peers, RankInfo, find_peers
from llmtrain.parallel.roll_call import format_ranks
from llmtrain.parallel.world import SHARE_GPU, World, ranks_per_device
from llmtrain.recipe_loader import load_recipe


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GLOO, raising=False)


def test_the_first_name_that_is_here_is_taken():
    assert Networks.from_recipe(ParallelSection()) == Networks()
    given = ParallelSection(replica_network="nope0, lo", shard_network="lo")
    assert Networks.from_recipe(given) == Networks("lo", "lo")


@pytest.mark.parametrize("key", ["replica_network", "shard_network"])
def test_a_name_that_is_not_here_is_refused_with_those_that_are(key):
    with pytest.raises(
        RecipeError, match=rf"parallel\.{key} is nope0,nope1, but .* no such network interface, .*\blo\b"
    ):
        Networks.from_recipe(ParallelSection(**{key: "nope0,nope1"}))


def test_so_is_one_in_the_variable(monkeypatch):
    monkeypatch.setenv(GLOO, "nope0")
    with pytest.raises(RecipeError, match="GLOO_SOCKET_IFNAME in the environment is nope0, but"):
        Networks.from_recipe(ParallelSection())


def test_loopback_is_never_chosen_unasked():
    assert address_of("lo") == address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") is interface_of("192.0.2.1") is interface_of(None) is None
    assert Networks().with_default_route("127.0.0.1") == Networks()
    assert Networks("lo").with_default_route("127.0.0.1") == Networks("lo")


def test_a_card_towards_the_others_is_chosen_unless_one_is_given(monkeypatch):
    monkeypatch.setattr("llmtrain.parallel.network.interface_of", lambda address: "ens5")
    assert Networks(shard="eth0").with_default_route("127.0.0.1") == Networks("ens5", "eth0")
    monkeypatch.setenv(GLOO, "lo")
    assert Networks(shard="eth0").with_default_route("127.0.0.1") == Networks(None, "eth0")


def told_to_nccl(monkeypatch: pytest.MonkeyPatch, networks: Networks, replicas_use_nccl: bool) -> str | None:
    """Return the interface that `networks` set in NCCL's environment variable."""
    monkeypatch.delenv(NCCL, raising=False)
    networks.set_nccl_interface(replicas_use_nccl)
    return os.environ.get(NCCL)


def test_nccl_has_one_card_for_all_its_groups(monkeypatch):
    networks = Networks("eth0", "ib0")
    assert told_to_nccl(monkeypatch, networks, replicas_use_nccl=True) == "=eth0"
    assert told_to_nccl(monkeypatch, networks, replicas_use_nccl=False) == "=ib0"
    assert told_to_nccl(monkeypatch, Networks(replica="eth0"), replicas_use_nccl=False) is None


def test_the_variable_is_back_afterwards(monkeypatch):
    with using_interface("eth0"), using_interface(None):
        assert os.environ[GLOO] == "eth0"
        with using_interface("eth1"):
            assert os.environ[GLOO] == "eth1"
        assert os.environ[GLOO] == "eth0"
    assert GLOO not in os.environ
    monkeypatch.setenv(GLOO, "ens5")
    with pytest.raises(KeyError), using_interface("eth0"):
        raise KeyError
    assert os.environ[GLOO] == "ens5"


def test_gloo_gets_the_first_interface_of_a_list_that_is_here(monkeypatch):
    monkeypatch.setenv(GLOO, "nope0, lo")
    with using_interface(None):
        assert os.environ[GLOO] == "lo"
    assert os.environ[GLOO] == "nope0, lo"


def test_ranks_are_listed_in_runs():
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([5, 4, 1, 7, 6]) == "ranks 1, 4-7"
    assert format_ranks([0, 1]) == "ranks 0-1"


def test_two_networks_of_nccl_in_one_process_are_refused(monkeypatch):
    recipe = Path("recipes/edit_llama_stdlib.yaml")
    networks = ["parallel.replica_network=eth0", "parallel.shard_network=ib0", "parallel.shard_across_nodes=true"]
    check_machine(load_recipe(recipe, networks))  # without GPUs, messages go over gloo
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check_machine(load_recipe(recipe, networks[:2]))
    check_machine(load_recipe(recipe, ["parallel.replica_backend=nccl"]))
    check_machine(load_recipe(recipe, [*networks, "parallel.replica_backend=gloo"]))
    with pytest.raises(RecipeError, match=r"replica_network is eth0 and .*shard_network ib0, .* nccl's"):
        check_machine(load_recipe(recipe, networks))


def told(monkeypatch: pytest.MonkeyPatch, *places: RankInfo) -> None:
    """Replace the roll call by one in which two ranks answer `places`."""
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("MASTER_PORT", "4711")
    monkeypatch.setattr("llmtrain.parallel.rendezvous._open_store", lambda *_: None)
    monkeypatch.setattr(
        "llmtrain.parallel.rendezvous.open_roll_call", lambda *_: (None, [asdict(place) for place in places])
    )
    monkeypatch.setattr("llmtrain.parallel.rendezvous.node_name", lambda: "a")
    monkeypatch.setattr("llmtrain.parallel.network.interface_of", lambda address: "ens5")


def test_nccl_is_not_told_the_card_that_was_found_for_gloo(monkeypatch):
    told(monkeypatch, RankInfo("a", "a", "192.0.2.1", 1.0), RankInfo("b", "b", "192.0.2.2", 1.0))
    peers = find_peers(World(0, 2, 0, 1), ParallelSection(shard_network="lo"), lambda: 1.0, 1.0)
    assert (peers.networks, peers.recipe_networks) == (Networks("ens5", "lo"), Networks(None, "lo"))
    assert told_to_nccl(monkeypatch, peers.recipe_networks, replicas_use_nccl=True) == "=lo"
    peers = find_peers(World(0, 2, 0, 1), ParallelSection(), lambda: 1.0, 1.0)
    assert peers.networks == Networks("ens5", "ens5")
    assert told_to_nccl(monkeypatch, peers.recipe_networks, replicas_use_nccl=True) is None


def test_a_host_whose_gpus_are_gone_is_named(monkeypatch):
    told(monkeypatch, RankInfo("a", "gpu-a", None, 1.0, on_gpu=True), RankInfo("b", "gpu-b", None, 1.0, on_gpu=False))
    with pytest.raises(TrainingError, match="rank 1 on gpu-b found no usable GPU, the others did"):
        find_peers(World(0, 2, 0, 1), ParallelSection(), lambda: 1.0, 1.0)


def test_a_gpu_for_each_task_is_the_first_that_it_sees(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(RecipeError, match="8 processes on a machine with 1 GPU"):
        local_device(World(3, 8, 3, 8))
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_TRES_PER_TASK", "cpu=8")
    with pytest.raises(RecipeError, match="8 processes on a machine with 1 GPU"):
        local_device(World(3, 8, 3, 8))
    monkeypatch.setenv("SLURM_TRES_PER_TASK", "cpu=8,gres/gpu=1")
    assert local_device(World(3, 8, 3, 8)) == torch.device("cuda", 0)
    monkeypatch.delenv("SLURM_TRES_PER_TASK")
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    assert local_device(World(3, 8, 3, 8)) == torch.device("cuda", 0)
    monkeypatch.delenv("SLURM_GPUS_PER_TASK")
    for name, value, is_alone in (
        ("SLURM_NTASKS_PER_GPU", "1", True),
        ("SLURM_NTASKS_PER_GPU", "2", False),
        ("SLURM_GPU_BIND", "verbose,single:1", True),
        ("SLURM_GPU_BIND", "closest", False),
        ("SLURM_TRES_BIND", "gres/gpu:single:1", True),
        ("SLURM_TRES_BIND", "gres/gpu:per_task:1", True),
        ("SLURM_TRES_BIND", "gres/gpu:single:16", False),
    ):
        monkeypatch.setenv(name, value)
        alone = nullcontext() if is_alone else pytest.raises(RecipeError, match="8 processes on a machine with 1 GPU")
        with alone:
            assert local_device(World(3, 8, 3, 8)) == torch.device("cuda", 0), (name, value)
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")  # one task that has started eight processes itself
    with pytest.raises(RecipeError, match="8 processes on a machine with 1 GPU"):
        local_device(World(3, 8, 3, 8))


def opened(world: World, replicas: int, shards: int, backend: str, peers: Peers) -> AbstractContextManager[Mesh]:
    return open_process_mesh(
        world, replicas=replicas, shards=shards, replica_backend=backend, timeout_seconds=5.0, peers=peers
    )


def test_ranks_share_a_gpu_if_the_user_says_so(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    world = World(3, 4, 3, 4)
    with pytest.raises(RecipeError, match=r"4 processes on a machine with 2 GPUs.*or set LLMTRAIN_SHARE_GPU=1"):
        local_device(world)
    assert ranks_per_device(world) == 1
    monkeypatch.setenv(SHARE_GPU, "1")
    assert [local_device(World(rank, 4, rank, 4)).index for rank in range(4)] == [0, 1, 0, 1]
    assert (ranks_per_device(world), ranks_per_device(World(1, 2, 1, 2))) == (2, 1)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("the mesh was built"))
    alone, sharing = RankInfo("a", "alpha", None, 1.0), RankInfo("b", "beta", None, 1.0, ranks_per_gpu=2)
    peers = Peers(None, [alone, alone, sharing, sharing], Networks())
    monkeypatch.delenv(SHARE_GPU)  # ranks of this host do not share a GPU, but those of another host do
    world = World(1, 4, 1, 2)
    for shard, backend, reason in (
        (2, "auto", "parallel.shards is 2, but .*; use parallel.shards=1"),
        (1, "nccl", "parallel.replica_backend is nccl, but .*; use auto or gloo"),
    ):
        with pytest.raises(RecipeError, match=reason), opened(world, 4 // shard, shard, backend, peers):
            pass
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr("llmtrain.parallel.mesh.build_mesh", lambda *_, replica_backend, **__: replica_backend)
    with opened(world, 4, 1, "auto", peers) as backend:
        assert backend == "gloo"
    with opened(World(1, 2, 1, 2), 2, 1, "auto", Peers(None, [alone] * 2, Networks())) as backend:
        assert backend == "auto"


@pytest.mark.parametrize(
    ("replicas", "shard", "backend", "given", "order"),
    [
        (2, 2, "auto", None, "1"),
        (2, 2, "nccl", "0", "0"),
        (2, 2, "gloo", None, None),
        (4, 1, "auto", None, None),
        (1, 4, "auto", None, None),
    ],
)
def test_two_communicators_of_nccl_on_a_gpu_keep_the_order_of_the_host(
    monkeypatch, replicas: int, shard: int, backend: str, given: str | None, order: str | None
):
    variable = "NCCL_LAUNCH_ORDER_IMPLICIT"
    monkeypatch.setenv(variable, "")  # so that monkeypatch undoes what the tested code sets
    monkeypatch.delenv(variable)
    if given is not None:
        monkeypatch.setenv(variable, given)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr("llmtrain.parallel.mesh.build_mesh", lambda *_, **__: None)
    seen = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: seen.append(os.environ.get(variable)))
    peers = Peers(None, [RankInfo("a", "alpha", None, 1.0)] * 4, Networks())
    with opened(World(1, 4, 1, 4), replicas, shard, backend, peers):
        assert seen == [order]


def test_a_host_without_a_way_to_the_others_has_no_address_towards_them():
    assert address_towards("no address") is None


def test_a_group_that_can_not_connect_names_rank_host_and_card(monkeypatch):
    def refuse(*_, **__) -> None:
        raise RuntimeError("connect timed out\na stack of C++")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    peers = Peers(None, [RankInfo("a", "alpha", None, 1.0)], Networks("ens5"))
    with (
        pytest.raises(TrainingError, match=r"^rank 0 of 1 on alpha could not connect .* over ens5: connect timed out$"),
        opened(World(0, 1, 0, 1), 1, 1, "auto", peers),
    ):
        pass


@pytest.mark.parametrize(("device", "is_left"), [("cpu", True), ("cuda", False)])
def test_a_mesh_of_gpus_is_not_left_in_order_after_an_error(monkeypatch, device: str, is_left: bool):
    """On its destruction, a group of NCCL would wait for collectives that the other ranks never join."""
    left, mesh = [], "parallel.mesh"
    monkeypatch.setattr(f"llmtrain.{mesh}.local_device", lambda world: torch.device(device))
    monkeypatch.setattr(f"llmtrain.{mesh}.build_mesh", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append(device))
    monkeypatch.setenv(NCCL, "=eth7")
    peers = Peers(None, [RankInfo("a", "a", None, 1.0)], Networks("lo", "lo"), Networks("lo", "lo"))
    with pytest.raises(KeyError), opened(World(0, 1, 0, 1), 1, 1, "auto", peers):
        raise KeyError
    assert bool(left) == is_left
    assert os.environ[NCCL] == ("=eth7" if device == "cpu" else "=lo")
    with opened(World(0, 1, 0, 1), 1, 1, "auto", peers):
        left.clear()
    assert left == [device]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (socket.gaierror(-2, "Name or service not known"), "localhost has no address (Name or service not known)"),
        ([(0, 0, 0, "", ("192.0.2.7", 0))], "localhost is 192.0.2.7 on this machine"),
    ],
)
def test_a_machine_without_localhost_is_named(monkeypatch, found, words):
    """The doctor reports it, and so does the launcher, before torch would wait for minutes."""

    def look_up(*_):
        if isinstance(found, OSError):
            raise found
        return found

    check_localhost()
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(TrainingError) as raised:
        check_localhost()
    assert words in str(raised.value) and "add the line `127.0.0.1 localhost` to /etc/hosts" in str(raised.value)
    (finding,) = localhost()
    assert words in finding.what and finding.advice.startswith("add the line") and finding.level == Level.PROBLEM
    with pytest.raises(TrainingError, match="localhost"), torchrun._with_endpoint(Nodes(1)):
        pass
