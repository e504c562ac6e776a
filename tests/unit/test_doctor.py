"""What the doctor finds, each kind of check by itself: fine, doubtful and broken."""

from __future__ import annotations

import errno
import io
import os
import resource
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from llmtrain.config import ParallelSection
from llmtrain.doctor import machine, network_speed
from llmtrain.doctor.finding import Finding, Level, has_problem, ok, problem, show_findings, verdict, warning
from llmtrain.doctor.machine import Card, axis_interfaces, environment, network_interfaces, replica_interface
from llmtrain.doctor.network_speed import (
    SECRET_BYTES,
    SHOWN,
    Link,
    LinkServer,
    links_between,
    measure_all,
    measure_link,
    tournament,
)
from llmtrain.doctor.run_checks import RankIdentity, agreement, encryption, fit, group, versions, who_is_where
from llmtrain.files import nearest_existing
from llmtrain.parallel.network import Networks
from llmtrain.parallel.world import World
from llmtrain.plan.time_estimate import round_bytes
from llmtrain.recipe_loader import load_recipe

ROOT = Path(__file__).resolve().parents[2]
STDLIB = ROOT / "recipes" / "edit_llama_stdlib.yaml"
GIB = 2**30
SECRET = bytes(range(SECRET_BYTES))
LOOPBACK, CARD = Card("lo", "127.0.0.1", True, 0), Card("eth0", "10.0.0.1", True, 10_000)


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level.value for finding in findings]


# ---- this machine


def test_versions_are_listed():
    (first, *rest) = machine.software()
    assert f"torch {torch.__version__}" in first.what and "transformers 5." in first.what
    assert rest[-1].what.startswith("backends: gloo")
    assert machine.installed_version("torch") and machine.installed_version("a-package-that-nobody-has") is None


@pytest.mark.parametrize(("gloo", "said"), [(False, "has no gloo"), (True, "has no NCCL, which GPUs need")])
def test_a_torch_that_can_not_talk_is_a_problem(monkeypatch, gloo, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine.dist, "is_gloo_available", lambda: gloo)
    monkeypatch.setattr(machine.dist, "is_nccl_available", lambda: False)
    found = machine.software()[-1]
    assert found.level == "problem" and said in found.what and found.advice.startswith("install a torch")


@pytest.mark.parametrize(
    ("cuda", "level", "said"), [(None, "problem", "built without CUDA"), ("13.0", "warning", "finds no usable GPU")]
)
def test_a_driver_that_torch_can_not_use_is_noticed(monkeypatch, tmp_path, cuda, level, said):
    driver = tmp_path / "version"
    driver.touch()
    monkeypatch.setattr(machine, "NVIDIA_DRIVER", driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    (found,) = [finding for finding in machine.software() if finding.level != Level.OK]
    assert found.level == level and said in found.what and found.advice


def test_gpus_are_listed_and_those_in_use_warned_of(monkeypatch):
    free = [79 * GIB, 20 * GIB]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="H100"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free[index], 80 * GIB))
    found = machine.gpus(World(0, 1, 0, 1))
    assert levels(found) == ["ok", "warning"]
    assert found[1].what == "GPU 1: H100, 20.0 of 80.0 GiB free"
    assert machine.gpus(World(1, 2, 1, 2)) == found[1:]  # a rank asks after its own only


@pytest.mark.parametrize(("gpus", "size", "level"), [(8, 64 * 2**20, "warning"), (8, GIB, "ok"), (0, 64 * 2**20, "ok")])
def test_little_shared_memory_matters_between_gpus(monkeypatch, tmp_path, gpus, size, level):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: SimpleNamespace(total=size))
    assert levels(machine.shared_memory(tmp_path, gpus)) == [level]
    assert machine.shared_memory(tmp_path / "none", gpus) == []


@pytest.mark.parametrize(("soft", "level"), [(1024, "warning"), (65536, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_few_open_files_are_warned_of(monkeypatch, soft, level):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (soft, resource.RLIM_INFINITY))
    found = machine.open_files()
    assert found.level == level
    assert ("the hard limit is unlimited" in found.advice) == (level == "warning")


@pytest.mark.parametrize(("needed", "level"), [(None, "ok"), (GIB, "ok"), (3 * GIB, "warning")])
def test_room_is_that_of_the_folder_above_if_there_is_none_yet(monkeypatch, tmp_path, needed, level):
    asked = []
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=2 * GIB))
    assert machine.disk("run.out_dir", str(tmp_path / "a" / "b" / "c"), needed).level == level
    assert asked == [tmp_path]


def test_a_folder_below_one_that_may_not_be_read_has_the_nearest_one_above(monkeypatch, tmp_path):
    real = os.stat

    def stat(path, *arguments, **named):
        if Path(path).is_relative_to(tmp_path / "locked") and path != tmp_path / "locked":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments, **named)

    (tmp_path / "locked").mkdir()
    monkeypatch.setattr(os, "stat", stat)
    assert nearest_existing(tmp_path / "locked/a/b") == tmp_path / "locked"


def test_a_folder_that_is_read_only_is_a_problem(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = machine.disk("data.cache_dir", str(tmp_path), None)
    assert found.level == "problem" and found.advice == "change data.cache_dir"


def test_variables_that_steer_are_listed_and_slow_ones_warned_of(monkeypatch):
    monkeypatch.setattr(os, "environ", {"NCCL_DEBUG": "trace", "MASTER_ADDR": "10.0.0.1", "HOME": "/nowhere"})
    found = environment()
    assert found[0].what == "environment: MASTER_ADDR=10.0.0.1 NCCL_DEBUG=trace"
    assert levels(found) == ["ok", "warning"] and found[1].advice == "unset NCCL_DEBUG"
    for connections, level in (("1", ["ok", "warning"]), ("8", ["ok"])):
        monkeypatch.setattr(os, "environ", {"CUDA_DEVICE_MAX_CONNECTIONS": connections})
        assert levels(environment()) == level


# ---- network cards


def test_cards_are_listed_with_address_and_speed():
    down = Card("eth1", None, False, 0)
    found = network_interfaces([LOOPBACK, CARD, down])
    assert found[0].what == "interfaces: lo (127.0.0.1), eth0 (10.0.0.1, 10 Gbit/s)"
    assert any(card.name == "lo" for card in machine.network_cards())


@pytest.mark.parametrize(
    ("variable", "value", "level"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", None),
        ("GLOO_SOCKET_IFNAME", "eth7", "problem"),
        ("NCCL_SOCKET_IFNAME", "eth", None),
        ("NCCL_SOCKET_IFNAME", "=eth", "problem"),
        ("NCCL_SOCKET_IFNAME", "=eth0,ib0", None),
        ("NCCL_SOCKET_IFNAME", "^lo,eth", "problem"),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", None),
    ],
)
def test_cards_that_the_environment_names_must_be_here(monkeypatch, variable, value, level):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    first, *found = network_interfaces([LOOPBACK, CARD])
    assert first.level == Level.OK
    assert levels(found) == ([level] if level else [])
    assert all(f"{variable}={value}" in finding.what and "eth0, lo" in finding.advice for finding in found)


def test_loopback_between_hosts_is_a_problem(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(machine, "address_of", {"lo": "127.0.0.1", "eth0": "10.0.0.1"}.get)
    assert levels(axis_interfaces(Networks(replica="eth0", shard="lo"))) == ["ok", "problem"]
    assert levels(axis_interfaces(Networks())) == ["ok", "ok"]
    assert replica_interface(Networks(replica="eth0"), "192.0.2.1") == ("eth0", "10.0.0.1")
    assert replica_interface(Networks(), "192.0.2.1") == ("?", "192.0.2.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert levels(axis_interfaces(Networks())) == ["problem", "problem"]


# ---- the recipe


def recipe(*overrides: str):
    return load_recipe(STDLIB, overrides)


def test_a_recipe_that_fits(tmp_path):
    loaded = recipe(f"run.out_dir={tmp_path}", f"data.cache_dir={tmp_path}")
    found, plan = fit(loaded, ["a"] * 4, [4 * GIB] * 4)
    assert levels(found) == ["ok"] * 5
    assert found[0].what == "mesh: 2 replicas x 2 shards (no GPU: parallel.on_cpu)"
    assert found[2].what.startswith("traffic between replicas: 7.6 MB from each of 2 replicas per round")
    assert (plan.replicas, plan.shards) == (2, 2)
    # A round's ring all-reduce sends 2 (N-1)/N of 4 bytes a parameter, split over the ranks of a replica.
    assert round_bytes(loaded, plan.size, 2, 2) == 2 * (1 / 2) * 4 * plan.size.parameters / 2


@pytest.mark.parametrize(("gib", "expected"), [(0.01, ["problem"]), (0.05, ["ok", "warning", "ok", "ok", "ok"])])
def test_too_little_memory_is_a_problem_and_little_a_warning(tmp_path, gib, expected):
    found, _ = fit(recipe(f"run.out_dir={tmp_path}", f"data.cache_dir={tmp_path}"), ["a"] * 4, [gib * GIB] * 4)
    assert levels(found) == expected
    assert "edit_llama_stdlib has 1," in found[0].what or "it may run out" in found[1].what


def test_the_smallest_memory_counts(tmp_path):
    loaded = recipe(f"run.out_dir={tmp_path}", f"data.cache_dir={tmp_path}")
    assert fit(loaded, ["a"] * 4, [4 * GIB, 4 * GIB, 0.01 * GIB, 4 * GIB])[1] is None
    found, _ = fit(loaded, ["a"] * 4, [4 * GIB, 4 * GIB, 0.05 * GIB, 4 * GIB])
    assert found[1].level == "warning" and "it may run out" in found[1].what


def test_a_mesh_that_is_impossible_is_a_problem():
    found, plan = fit(recipe("parallel.replicas=2", "parallel.shards=2"), ["a"] * 3, [4 * GIB] * 3)
    assert plan is None and levels(found) == ["problem"]
    assert found[0].what.startswith(
        "recipe: parallel.replicas x parallel.shards = 2 x 2 needs 4 processes, there are 3"
    )


def test_without_a_vocabulary_nothing_is_estimated(tmp_path):
    loaded = recipe("data.tokenizer=somebody/tokens", f"run.out_dir={tmp_path}", f"data.cache_dir={tmp_path}")
    found, plan = fit(loaded, ["a"] * 4, [4 * GIB] * 4)
    assert levels(found) == ["ok", "warning", "ok", "ok"] and plan.size is None


# ---- who is where


def rank(number: int, node: str, **differing: str) -> RankIdentity:
    same = {"llmtrain": "1", "torch": "2", "python": "3", "recipe": "4"}
    return RankIdentity(number, node, node, "eth0", f"10.0.0.{node[-1]}", "cpu", {**same, **differing})


def test_ranks_are_listed_by_host():
    hosts = group([rank(0, "node1"), rank(1, "node1"), rank(2, "node2"), rank(3, "node2")])
    assert [finding.what for finding in who_is_where(hosts)] == [
        "node1 (10.0.0.1), eth0: ranks 0-1 on cpu",
        "node2 (10.0.0.2), eth0: ranks 2-3 on cpu",
    ]
    uneven = group([rank(0, "node1"), rank(1, "node1"), rank(2, "node2")])
    assert levels(who_is_where(uneven)) == ["ok", "ok", "warning"]


def test_a_public_network_between_hosts_is_a_warning_unless_the_recipe_allows_it():
    hosts = group([rank(0, "node1"), replace(rank(1, "node2"), address="203.0.113.2")])
    assert encryption(group([rank(0, "node1"), rank(1, "node2")]), ParallelSection()) == []
    assert encryption(hosts, ParallelSection(allow_unencrypted=True)) == []
    [found] = encryption(hosts, ParallelSection())
    assert found.level == "warning" and "launch/two_sites.md" in found.advice
    assert found.what == (
        "messages between 203.0.113.2 (eth0 of node2) and 10.0.0.1 (eth0 of node1) cross a public network unencrypted"
    )


@pytest.mark.parametrize(("name", "level"), [("torch", "problem"), ("recipe", "problem"), ("python", "warning")])
def test_versions_that_differ_are_named_with_their_ranks(name, level):
    found = agreement([rank(0, "node1"), rank(1, "node1", **{name: "other"}), rank(2, "node2")])
    assert levels(found) == [level]
    assert found[0].what.startswith(f"{name} differs: ") and "other on rank 1" in found[0].what
    assert "on ranks 0, 2" in found[0].what


def test_recipes_are_compared_by_their_resolved_values():
    assert versions(recipe())["recipe"] == versions(recipe("optim.lr=3e-3"))["recipe"]
    assert versions(recipe())["recipe"] != versions(recipe("optim.lr=4e-3"))["recipe"]
    assert agreement([rank(0, "node1"), rank(1, "node2")])[0].level == "ok"


# ---- links


@pytest.mark.parametrize("hosts", [2, 3, 4, 7, 8])
def test_every_pair_meets_once_and_nobody_twice_at_a_time(hosts):
    rounds = list(tournament(hosts))
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(hosts), 2))
    for pairs in rounds:
        busy = [host for pair in pairs for host in pair]
        assert len(busy) == len(set(busy))


@pytest.fixture
def server():
    running = LinkServer("127.0.0.1", SECRET, 5)
    yield running
    running.close()


def test_a_link_is_measured(server):
    link = measure_link(0, 1, "127.0.0.1", ("127.0.0.1", server.port), SECRET, 5)
    assert (link.here, link.there, link.error) == (0, 1, "")
    assert link.sent > 1e6 and link.received > 1e6
    assert 0 < link.milliseconds < 1000 and abs(link.skew) < 1


def test_a_clock_that_is_off_is_seen(server, monkeypatch):
    def clock() -> float:
        """Of the server, which runs in a thread of its own, 100 s ahead."""
        return 1100.0 if threading.current_thread() is not threading.main_thread() else 1000.0

    monkeypatch.setattr(
        network_speed, "time", SimpleNamespace(time=clock, perf_counter=network_speed.time.perf_counter)
    )
    link = measure_link(0, 1, "127.0.0.1", ("127.0.0.1", server.port), SECRET, 5)
    assert link.skew == pytest.approx(100, abs=1)


def test_strangers_get_nothing_from_the_server(server):
    link = measure_link(0, 1, "127.0.0.1", ("127.0.0.1", server.port), bytes(SECRET_BYTES), 5)
    assert link.error and link.sent == 0


def test_a_host_that_is_not_there_is_an_error_within_the_timeout():
    with socket.socket() as taken:  # bound, so that nobody else gets the port, but not listening
        taken.bind(("127.0.0.1", 0))
        link = measure_link(0, 1, "127.0.0.1", taken.getsockname(), SECRET, 5)
    assert link.error == "Connection refused"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = measure_link(0, 1, "127.0.0.1", silent.getsockname(), SECRET, 0.3)
    assert link.error == "no answer in 0.3 s"


def test_all_links_are_measured_between_two_hosts():
    """Both hosts in this process; the exchange of the real ones is a roll call."""
    barrier, told = threading.Barrier(2), {}

    def host(me: int) -> list[Link]:
        def exchange(name, value):
            told[name, me] = value
            barrier.wait(20)
            return [told[name, 0], told[name, 1]]

        return measure_all(me, ["127.0.0.1", "127.0.0.1"], SECRET, 5, exchange)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(host, (0, 1))
    assert first == second and [(link.here, link.there, link.error) for link in first] == [(0, 1, "")]


THREE_HOSTS = ["node1 (10.0.0.1)", "node2 (10.0.0.2)", "node3 (10.0.0.3)"]


def link(here: int, there: int, rate: float = 1e8, skew: float = 0.0, error: str = "") -> Link:
    return Link(here, there, 0.5, rate, 2 * rate, skew, error)


def test_pairs_that_can_not_talk_are_named():
    found = links_between(THREE_HOSTS, [link(0, 1, error="timed out"), link(0, 2), link(1, 2)])
    assert levels(found) == ["problem", "ok", "ok", "ok"]
    assert found[0].what == "node2 (10.0.0.2) can't reach node1 (10.0.0.1): timed out"
    assert "MASTER_PORT" in found[0].advice
    assert levels(links_between(THREE_HOSTS, [link(0, 1, error="x")])) == ["problem"]


def test_a_slow_link_and_a_clock_that_is_off_are_warned_of():
    found = links_between(THREE_HOSTS, [link(0, 1), link(0, 2, rate=1e7), link(1, 2, skew=-3)])
    assert levels(found) == ["warning", "ok", "ok", "warning"]
    assert found[0].what.startswith("node3 (10.0.0.3) to node1 (10.0.0.1): 0.50 ms there and back, 10.0 MB/s sent")
    assert found[3].what == "the clock of node2 (10.0.0.2) is -3.0 s off that of node3 (10.0.0.3)"
    fine = links_between(THREE_HOSTS, [link(0, 1, skew=0.002)])
    assert fine[-1].what == "clocks agree to 2.0 ms"


def test_of_many_links_the_slowest_are_shown():
    found = links_between(list("abcdefgh"), [link(a, b, rate=1e8 + a) for a, b in combinations(range(8), 2)])
    assert len(found) == SHOWN + 2
    assert found[SHOWN].what.startswith("13 more links, none of them slower")


# ---- the report


def test_the_report_says_what_to_do_and_counts():
    out = Console(record=True, width=100, file=io.StringIO())
    sections = {"machine": [ok("fine [here]")], "network": [warning("odd", "look"), problem("broken", "mend it")]}
    show_findings(sections, out)
    text = out.export_text()
    assert "fine [here]" in text and "→ mend it" in text and "1 problem, 1 warning" in text
    assert has_problem(sections) and not has_problem({"network": [warning("odd", "look")]})
    assert verdict([ok("fine")]) == "everything is fine"
    assert verdict([warning("a", ""), warning("b", "")]) == "no problems, 2 warnings"
