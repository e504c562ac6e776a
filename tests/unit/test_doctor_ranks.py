"""Tests of the doctor on several ranks: rendezvous, measurements, complaints of other hosts, and needs of a recipe."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Barrier, Lock, local
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmtrain.config import Recipe
from llmtrain.doctor import network_speed
from llmtrain.doctor import run_checks as checks
from llmtrain.doctor.finding import Finding, Level, ok, problem, warning
from llmtrain.doctor.network_speed import Link, round_trip_ms
from llmtrain.doctor.network_use import network_use, slowest_rate
from llmtrain.doctor.run_checks import ClusterCheck, Plan, Sections, fit, run_checks
from llmtrain.doctor.run_folder import shared_run_folder
from llmtrain.errors import FAILED, TrainingError
from llmtrain.parallel import rendezvous
from llmtrain.parallel.network import Networks, unused_port
from llmtrain.parallel.rendezvous import Peers, RankInfo
from llmtrain.parallel.roll_call import gather_over_store
from llmtrain.parallel.world import World
from llmtrain.plan.memory import estimate
from llmtrain.plan.model_size import size_of
from llmtrain.plan.time_estimate import HardwareRates, round_bytes
from llmtrain.quantities import mesh_size
from llmtrain.recipe_loader import load_recipe
from llmtrain.train.shared_folder import ADVICE

STDLIB = Path(__file__).resolve().parents[2] / "recipes/edit_llama_stdlib.yaml"
GIB = 2.0**30


@pytest.fixture(autouse=True)
def meeting_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(unused_port()))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Recipe]:
    folders = [f"run.out_dir={tmp_path}", f"data.cache_dir={tmp_path}"]
    return lambda *overrides: load_recipe(STDLIB, [*folders, *overrides])


def by_all(ranks: int, do: Callable[[World], Any]) -> list[Any]:
    """Run `do` on each rank, as threads of this process, and return what it returned or raised, by rank."""

    def one(rank: int) -> Any:
        try:
            return do(World(rank, ranks, 0, 1))
        except Exception as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def test_ranks_that_can_not_meet_are_a_problem_in_the_report_of_the_first(
    recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    given = recipe("parallel.replica_network=wlan7")
    code, error = by_all(2, lambda world: run_checks(given, world, 20))
    shown = " ".join(capsys.readouterr().out.split())
    assert code == FAILED
    assert "ranks problem parallel.replica_network is wlan7" in shown and shown.count("interfaces: ") == 1
    assert isinstance(error, TrainingError) and str(error).startswith("parallel.replica_network is wlan7")


def test_a_wait_that_was_too_short_names_the_doctors_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def late(*arguments: Any) -> None:
        raise TrainingError("rank 1 of 2 did not answer within 9 s (run.timeout_seconds)")

    monkeypatch.setattr(checks, "find_peers", late)
    with pytest.raises(TrainingError, match=r"within 9 s \(--timeout\)"):
        run_checks(None, World(1, 2, 1, 2), 9)
    assert run_checks(None, World(0, 2, 0, 2), 9) == FAILED
    assert "within 9 s (--timeout)" in " ".join(capsys.readouterr().out.split())


def test_ranks_wait_longer_for_a_link_than_its_measurement_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: dict[str, float] = {}

    def gather(store: None, world: World, when: str, mine: Any, seconds: float) -> list[Any]:
        waits[when] = seconds
        return [mine]

    def measure(me: int, addresses: list[str], secret: bytes, seconds: float, exchange: Callable[..., list]) -> list:
        waits["measurement"] = seconds
        return exchange("link in round 0", None)

    monkeypatch.setattr(checks, "gather_over_store", gather)
    monkeypatch.setattr(checks, "measure_all", measure)
    leader = SimpleNamespace(leader=SimpleNamespace(rank=0, address="127.0.0.1"))
    ClusterCheck(None, World(0, 1, 0, 1), SimpleNamespace(store=None), 20)._links([leader])
    assert waits["measurement"] == 20 and waits["of the doctor, link in round 0"] == 40


class Opened(list):
    """Record of the meshes that were opened and measured: (replicas, shards, bytes per round) of each."""

    rate: float | None = None
    """Bytes per second that a measurement between replicas returns."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: set[tuple[float, float]] = set()
        """Round trips and timeouts, in seconds, with which meshes were measured."""

    @contextmanager
    def open_process_mesh(self, world: World, replicas: int, shards: int, **others: Any) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(replicas=replicas, shards=shards, broadcast_from_main=lambda ask: ask())

    def axes(
        self, mesh: SimpleNamespace, bytes_a_round: float | None, round_trip: float, timeout_seconds: float
    ) -> tuple[list[Finding], float | None]:
        self.append((mesh.replicas, mesh.shards, bytes_a_round))
        self.waits.add((round_trip, timeout_seconds))
        return [ok("measured")], self.rate


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Record meshes instead of opening them, because ranks that are threads have no process groups. Measure links briefly. Build
    models one at a time, because building a model without its weights changes torch for the whole process."""
    found, one_at_a_time = Opened(), Lock()

    def fit_alone(*arguments: Any) -> tuple[list[Finding], Plan | None]:
        with one_at_a_time:
            return fit(*arguments)

    monkeypatch.setattr(checks, "fit", fit_alone)
    monkeypatch.setattr(checks, "open_process_mesh", found.open_process_mesh)
    monkeypatch.setattr(checks, "bench_collectives", found.axes)
    monkeypatch.setattr(network_speed, "LONG_ENOUGH", 0.0)
    return found


def examined(
    recipe: Recipe | None, nodes: list[str], address: str | None = "127.0.0.1", **complaints: Finding
) -> list[Sections]:
    """Return the sections of each rank. `nodes` has the name of each rank's node. A rank of a node in `complaints` has already found
    that complaint."""
    places = [RankInfo(node, node, address, GIB) for node in nodes]
    peers = Peers(dist.HashStore(), places, Networks())

    def one(world: World) -> Sections:
        node = nodes[world.rank]
        sections: Sections = {"network": [], "machine": [complaints[node]] if node in complaints else []}
        if measure := ClusterCheck(recipe, world, peers, 20).add_to(sections):
            sections["collectives"] = measure()
        return sections

    return by_all(len(nodes), one)


def test_without_a_recipe_the_mesh_is_the_one_that_auto_gives(opened: Opened) -> None:
    for sections in examined(None, ["a", "a"]):
        assert "recipe" not in sections and "other hosts" not in sections and sections["network"] == []
        assert sections["links"] == [ok("all ranks are on one host")]
        assert sections["collectives"] == [ok("measured")]
    assert opened == [(2, 1, None)] * 2
    assert examined(None, ["a", "a", "b"])[0]["collectives"] == [ok("measured")]  # uneven hosts: one rank per replica
    assert opened[2:] == [(3, 1, None)] * 3


def test_a_report_is_shown_before_collectives_are_measured_and_is_complete_if_they_fail(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A collective of NCCL that hangs ends the process."""
    together, shown = Barrier(2), []

    def fail(*arguments: Any) -> None:
        if together.wait(20) == 0:  # both ranks are here, and read the output once
            shown.append(capsys.readouterr().out)
        together.wait(20)
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 GiB")

    monkeypatch.setattr(checks, "bench_collectives", fail)
    code, error = by_all(2, lambda world: run_checks(None, world, 20))
    assert "interfaces: " in shown[0] and "all ranks are on one host" in shown[0] and "collectives" not in shown[0]
    rest = " ".join(capsys.readouterr().out.split())
    assert rest.startswith("collectives problem CUDA out of memory. Tried to allocate 1 GiB 1 problem, ")
    assert code == FAILED and isinstance(error, TrainingError) and str(error).startswith("CUDA out of memory. Tried")


def test_hosts_with_other_versions_of_the_doctor_are_told_which(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each version may exchange other values, which the others can't read."""
    of_rank = local()

    def one(world: World) -> int:
        of_rank.version = str(1 + world.rank)
        return run_checks(None, world, 20)

    def exchange(values: Any) -> dict[str, Any]:
        return {**asdict(values), f"field of version {of_rank.version}": 0}

    monkeypatch.setattr(checks, "identity", lambda: {"llmtrain": of_rank.version})
    monkeypatch.setattr(checks, "asdict", exchange)
    monkeypatch.setattr(rendezvous, "asdict", exchange)
    code, error = by_all(2, one)
    host = socket.gethostname()
    line = f"ranks have different recipes or versions: llmtrain is 1 for rank 0 on {host}, 2 for rank 1 on {host}; "
    assert code == FAILED and isinstance(error, TrainingError) and str(error).startswith(line)
    assert f"ranks problem {line}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("replicas", "shard"), [(2, 1), (1, 2)])
def test_a_recipes_mesh_is_measured_and_its_round_if_there_is_one(
    recipe: Callable[..., Recipe], opened: Opened, replicas: int, shard: int
) -> None:
    given = recipe(f"parallel.replicas={replicas}", f"parallel.shards={shard}")
    for sections in examined(given, ["a", "a"]):
        assert sections["recipe"][0] == ok(f"mesh: {mesh_size(replicas, shard)} (as the recipe says)")
    _, plan = fit(given, ["a", "a"], [GIB, GIB])
    sent = round_bytes(given, plan.size, 2, 1) if replicas == 2 else None
    assert opened == [(replicas, shard, sent)] * 2


def test_the_recipes_waits_are_predicted_from_what_was_measured(
    recipe: Callable[..., Recipe], opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prediction uses the rate of all ranks of a replica, and half of the longest round trip between hosts."""
    opened.rate = 1e6
    asked: list[int] = []
    monkeypatch.setattr(checks, "rate_here", lambda recipe, local_ranks: asked.append(local_ranks) or 1e10)
    monkeypatch.setattr(checks, "round_trip_ms", lambda links: 40.0)
    given = recipe("parallel.replicas=2", "parallel.shards=2")
    _, plan = fit(given, ["a", "a", "b", "b"], [GIB] * 4)
    predicted = network_use(given, plan.size, 2, 2, HardwareRates(1e10, 16.0, 20.0))
    for sections in examined(given, ["a", "a", "b", "b"]):
        assert sections["collectives"] == [ok("measured"), predicted]
    assert opened.waits == {(0.04, 20)}
    assert set(asked) == {1}, "the `World` of each rank has one rank per host"
    assert round_trip_ms([Link(0, 1, 3.0), Link(0, 2, 80.0, error="timed out"), Link(1, 2, 5.0)]) == 5.0
    assert round_trip_ms([]) == 0.0


def test_the_slowest_host_is_predicted_and_named_if_another_is_much_faster(recipe: Callable[..., Recipe]) -> None:
    """Only one rank per host has measured its rate."""
    equal, unequal = recipe(), recipe("train.batch_shares=[2, 1]")
    assert slowest_rate(["a", "a", "b"], [1e10, None, 1.4e10], equal, 1) == (1e10, [])
    rate, [found] = slowest_rate(["a", "a", "b", "c"], [4e10, None, 2.5e10, 1e10], equal, 2)
    assert rate == 1e10 and found.level == Level.WARNING and "sync.method=a_edit" in found.advice
    assert found.what == "ranks on a take a step 4.0 times as fast as those on c; the slowest is predicted below"
    shared = slowest_rate(["a", "a", "b", "b"], [4e10, None, 2e10, None], unequal, 2)
    assert shared == (pytest.approx(3e10), []), "half the speed with half the work is not slow"


def test_hosts_share_the_run_directory_or_are_named(
    recipe: Callable[..., Recipe], opened: Opened, tmp_path: Path
) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    for folder in (shared, other):
        folder.mkdir()
    given = recipe("parallel.replicas=3", "parallel.shards=1", f"run.out_dir={shared}/runs")
    found = ok(f"run.out_dir={shared}/runs is the same folder on all 2 hosts")
    assert [sections["recipe"][-1] for sections in examined(given, ["a", "a", "b"])] == [found] * 3

    here, store = socket.gethostname(), dist.HashStore()

    def look(world: World) -> list[Finding]:
        def gather(name: str, value: Any) -> list[Any]:
            return gather_over_store(store, world, name, value, 20)

        folder = other if world.rank == 2 else shared
        return shared_run_folder(f"{folder}/runs", world.rank, [0, 2], gather, timeout_seconds=0.0)

    line = f"run.out_dir is not shared: {here} can't see in {other} what rank 0 on {here} writes to {shared}"
    assert by_all(3, look) == [[problem(line, ADVICE)]] * 3
    assert not list(shared.iterdir()) and not list(other.iterdir())


def test_what_a_rank_of_another_host_complains_of_is_told_once(opened: Opened) -> None:
    first, second, third = examined(None, ["a", "b", "b"], a=warning("few files", ""), b=problem("broken", "mend it"))
    assert first["other hosts"] == [Finding(Level.PROBLEM, "b (127.0.0.1): broken", "mend it")]
    assert second["other hosts"] == third["other hosts"] == [Finding(Level.WARNING, "a (127.0.0.1): few files", "")]
    assert first["network"] == [ok(f"{axis} axis: the backend chooses the interface") for axis in ("replica", "shard")]
    # The third rank only listens, because the first rank of its host measures.
    assert first["links"] == second["links"] == third["links"]
    assert first["links"][0].what.startswith("b (127.0.0.1) to a (127.0.0.1): ")
    for sections in (first, second, third):
        assert sections["collectives"] == [warning("not measured, because of the problems found", "solve them first")]
    assert not opened


def test_links_between_hosts_without_ipv4_addresses_are_not_measured(opened: Opened) -> None:
    """Instead of the other hosts, each host's own loopback address would have answered."""
    for sections in examined(None, ["a", "b"], address=None):
        advice = "give the hosts IPv4 addresses, and MASTER_ADDR one of them; training over IPv6 alone is not checked"
        assert sections["links"] == [warning("not measured, because no IPv4 address is known for a, b", advice)]
        assert sections["collectives"] == [ok("measured")]


def test_a_gpu_without_bf16_is_a_problem_for_a_recipe_that_has_it(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    found, _ = fit(recipe("parallel.precision=bf16"), ["a"] * 4, [4 * GIB] * 4)
    assert found[1] == problem("this GPU does not compute in bf16", "set parallel.precision=fp32")
    found, _ = fit(recipe("parallel.precision=fp32"), ["a"] * 4, [4 * GIB] * 4)
    assert {finding.level for finding in found} == {Level.OK}


@pytest.mark.parametrize(("share", "level"), [(0.79, Level.OK), (0.81, Level.WARNING)])
def test_what_is_pinned_on_a_node_is_compared_with_its_memory(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, share: float, level: Level
) -> None:
    """There are two nodes of two ranks. First, each rank pins an offloaded anchor and momentum."""
    nodes = ["a", "a", "b", "b"]
    large = ["parallel.precision=fp32", "model.config.hidden_size=1000"]
    given = recipe("sync.offload=true", "checkpoint.background=false", *large)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    needed = estimate(given, size_of(given), 2, 2)
    pinned = 2 * needed.host_total
    monkeypatch.setattr(checks, "memory_bytes", lambda device: pinned / share)
    found, _ = fit(given, nodes, [4 * GIB] * 4)
    [one] = [finding for finding in found if finding.what.startswith("CPU memory")]
    assert one.level == level
    assert (
        f"about {pinned / GIB:.1f} GiB per node" in one.what
        and f"this node has {pinned / share / GIB:.1f} GiB" in one.what
    )
    wagma = recipe("sync.method=wagma", "checkpoint.background=false", *large)
    newest = 2 * estimate(wagma, size_of(wagma), 2, 2).host_total
    monkeypatch.setattr(checks, "memory_bytes", lambda device: newest / share)
    found, _ = fit(wagma, nodes, [4 * GIB] * 4)
    [one] = [finding for finding in found if finding.what.startswith("CPU memory")]
    assert one.level == level and f"about {newest / GIB:.1f} GiB per node are taken by the newest models" in one.what
    copied = recipe("sync.offload=false", *large)
    state = 2 * estimate(copied, size_of(copied), 2, 2).host_total
    monkeypatch.setattr(checks, "memory_bytes", lambda device: state / share)
    found, _ = fit(copied, nodes, [4 * GIB] * 4)
    [one] = [finding for finding in found if finding.what.startswith("CPU memory")]
    assert one.level == level and f"about {state / GIB:.1f} GiB per node are copied for a checkpoint" in one.what
    found, _ = fit(recipe("sync.method=synchronous", "checkpoint.background=false", *large), nodes, [4 * GIB] * 4)
    assert not [finding for finding in found if finding.what.startswith("CPU memory")]


@pytest.mark.parametrize(
    ("keys", "on_gpu", "what", "advice"),
    [
        ([], True, "memory", ["micro_batch", "activation_checkpointing=true", "sync.offload=true", "shards"]),
        ([], False, "memory", ["micro_batch", "activation_checkpointing=true", "background=false", "shards"]),
        (["parallel.engine=zero"], False, "memory", ["micro_batch", "activation_checkpointing=true", "shards"]),
        (["sync.offload=true"], True, "memory", ["micro_batch", "activation_checkpointing=true", "shards"]),
        (
            ["train.micro_batch=1", "parallel.activation_checkpointing=true", "sync.method=local_sgd"],
            True,
            "memory",
            ["shards"],
        ),
        ([], True, "CPU memory", ["checkpoint.background=false", "shards"]),
        (["sync.offload=true", "checkpoint.background=false"], True, "CPU memory", ["sync.offload=false", "shards"]),
        (["parallel.engine=zero"], True, "CPU memory", ["shards"]),
        (["parallel.engine=zero", "parallel.zero_offload=true"], True, "CPU memory", ["zero_offload=false", "shards"]),
    ],
)
def test_what_would_not_help_is_not_advised(
    recipe: Callable[..., Recipe],
    monkeypatch: pytest.MonkeyPatch,
    keys: list[str],
    on_gpu: bool,
    what: str,
    advice: list[str],
) -> None:
    given = recipe("parallel.replicas=2", "parallel.shards=2", *keys)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(checks, "memory_bytes", lambda device: 1.0)
    needed = estimate(given, size_of(given), 2, 2).total(on_gpu)
    found, _ = fit(given, ["a"] * 4, [needed / 0.9] * 4)
    [one] = [finding for finding in found if finding.what.startswith(f"{what}:")]
    keys_named = re.findall(r"\w+\.(\w+(?:=\w+)?)", one.advice)
    assert [key.rpartition(".")[2] for key in advice] == keys_named
