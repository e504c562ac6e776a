"""Tests of the doctor's findings, one kind of check at a time: no problem, a warning, or a problem."""

from __future__ import annotations

import errno
import io
import os
import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from llmtrain.config import ParallelSection
from llmtrain.consistency import common_values, recipe_values
from llmtrain.doctor import machine, run_checks
from llmtrain.doctor.finding import Finding, Level, has_problem, ok, problem, show_findings, verdict, warning
from llmtrain.doctor.machine import Card, axis_interfaces, environment, network_interfaces, replica_interface
from llmtrain.doctor.rank_identity import RankIdentity, agreement, encryption, group, who_is_where
from llmtrain.doctor.run_checks import fit
from llmtrain.files import nearest_existing
from llmtrain.parallel.network import Networks
from llmtrain.parallel.world import World
from llmtrain.plan.time_estimate import round_bytes
from llmtrain.recipe_loader import load_recipe

ROOT = Path(__file__).resolve().parents[2]
STDLIB = ROOT / "recipes" / "edit_llama_stdlib.yaml"
GIB = 2**30
LOOPBACK, CARD = Card("lo", "127.0.0.1", True, 0), Card("eth0", "10.0.0.1", True, 10_000)


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level.value for finding in findings]


# ---- this machine


def test_versions_agree_where_those_of_a_run_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    of_run = common_values(load_recipe(STDLIB))
    assert machine.identity()["torch"] == of_run["torch"] == "2.13.0"
    assert machine.identity()["llmtrain"] == of_run["llmtrain"]


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
    assert found.level == "problem" and said in found.what and found.advice.startswith("install a build of torch")


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
    assert machine.gpus(World(1, 2, 1, 2)) == found[1:]  # a rank checks its own GPU only


@pytest.mark.parametrize("error", [RuntimeError("out of\nmemory"), AssertionError("Invalid device id")])
def test_a_gpu_that_can_not_be_used_is_a_problem_and_the_others_are_still_listed(monkeypatch, error):
    """CUDA initializes at the first query of properties, and rejects a device that only the driver counts."""

    def properties(index: int) -> SimpleNamespace:
        if index == 0:
            raise error
        return SimpleNamespace(name="H100")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (80 * GIB, 80 * GIB))
    first, second = machine.gpus(World(0, 1, 0, 1))
    assert first == problem(f"GPU 0 can't be used: {' '.join(str(error).split())}", "see nvidia-smi")
    assert second == ok("GPU 1: H100, 80.0 of 80.0 GiB free")


@pytest.mark.parametrize(("gpus", "size", "level"), [(8, 64 * 2**20, "warning"), (8, GIB, "ok"), (0, 64 * 2**20, "ok")])
def test_little_shared_memory_matters_between_gpus(monkeypatch, tmp_path, gpus, size, level):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: SimpleNamespace(total=size))
    assert levels(machine.shared_memory(tmp_path, gpus)) == [level]
    assert levels(machine.shared_memory(tmp_path / "none", gpus)) == ["warning"]


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


def test_a_file_in_place_of_a_folder_and_a_folder_that_may_not_be_entered_are_problems(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "runs"):
        found = machine.disk("run.out_dir", str(folder), None)
        assert found == problem(f"run.out_dir={folder} can't be a folder ({file} is a file)", "change run.out_dir")
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.X_OK)
    assert machine.disk("run.out_dir", str(tmp_path / "runs"), None).level == Level.PROBLEM


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
        ("GLOO_SOCKET_IFNAME", "docker0, eth0", None),
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
    # A round's ring all-reduce sends 2 (N-1)/N of 4 bytes per parameter, split over the ranks of a replica.
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


def test_more_processes_than_gpus_are_a_problem_without_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC_PER_NODE", "8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 7)
    (found,) = run_checks._alone(load_recipe(ROOT / "recipes/edit_1b.yaml"))
    assert found.level == Level.PROBLEM and "8 processes on a machine with 7 GPUs" in found.what


def test_without_a_vocabulary_nothing_is_estimated(tmp_path):
    loaded = recipe("data.tokenizer=somebody/tokens", f"run.out_dir={tmp_path}", f"data.cache_dir={tmp_path}")
    found, plan = fit(loaded, ["a"] * 4, [4 * GIB] * 4)
    assert levels(found) == ["ok", "warning", "ok", "ok"] and plan.size is None


def test_there_is_to_be_room_for_a_checkpoint_more_than_is_kept(tmp_path: Path, monkeypatch) -> None:
    """The oldest checkpoint is deleted once the newest is complete. The best one may be older than those that are kept."""
    needed = []
    monkeypatch.setattr(run_checks, "disk", lambda key, folder, size, *_, **__: needed.append(size) or ok(key))
    for keep, best in ((1, "false"), (3, "false"), (2, "true")):
        keys = (f"checkpoint.keep={keep}", f"checkpoint.keep_best={best}", "checkpoint.every=10")
        overrides = [f"run.out_dir={tmp_path}", "data.tokenizer=train:400", *keys]
        run_checks.fit(recipe(*overrides), ["node"] * 4, [2.0**34] * 4)
    assert needed[0] > 0 and needed[2] == needed[4] == 2 * needed[0]


def test_the_disk_must_also_hold_what_evaluations_export(monkeypatch: pytest.MonkeyPatch) -> None:
    needed: list[int] = []
    monkeypatch.setattr(run_checks, "disk", lambda key, folder, size, *_, **__: needed.append(size) or ok(key))
    lengths = ["train.steps=1900", "checkpoint.every=100"]
    for suite in ("null", "{name: small, every: 5}"):
        _, plan = fit(recipe(*lengths, f"eval.suite={suite}"), ["a"] * 4, [GIB] * 4)
    without, _, with_suite, _ = needed
    assert with_suite - without == 4 * 4 * plan.size.parameters, "four exports, after steps 500, 1000, 1500 and 1900"


# ---- who is where


def rank(number: int, node: str, **differing: str) -> RankIdentity:
    same = {"llmtrain": "1", "torch": "2", "python": "3"}
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


@pytest.mark.parametrize(("name", "level"), [("torch", "problem"), ("python", "warning")])
def test_versions_that_differ_are_named_with_their_ranks(name, level):
    ranks = [rank(0, "node1"), rank(1, "node1", **{name: "other"}), rank(2, "node2")]
    found = agreement(ranks)
    assert levels(found) == [level]
    assert found[0].what == f"{name} is {ranks[0].versions[name]} for ranks 0, 2, other for rank 1"


def test_recipes_are_compared_by_their_resolved_values():
    def with_recipes(*overrides: str) -> list[Finding]:
        recipes = [recipe_values(recipe(*given)) for given in ([], overrides)]
        return agreement([replace(rank(number, f"node{number}"), recipe=recipes[number]) for number in (0, 1)])

    same = [ok("the same llmtrain, torch, python, recipe on all 2 ranks")]
    assert with_recipes("optim.lr=3e-3") == with_recipes("data.cache_dir=elsewhere", "run.out_dir=there") == same
    [found] = with_recipes("optim.lr=4e-3", "eval.suite=small")
    assert found.level == "problem"
    assert found.what.startswith(
        "recipe differs: optim.lr is 0.003 for rank 0, 0.004 for rank 1; eval.suite is null for rank 0, "
    )


# ---- the report


def test_both_parts_of_the_report_have_one_empty_line_before_each_section():
    out = Console(record=True, width=100, file=io.StringIO())
    show_findings({"machine": [ok("a"), ok("b")], "network": [ok("c")]}, out)
    show_findings({"collectives": [ok("d")]}, out)
    assert [line.split() for line in out.export_text().splitlines()] == [
        [],
        ["machine", "ok", "a"],
        ["ok", "b"],
        [],
        ["network", "ok", "c"],
        [],
        ["collectives", "ok", "d"],
    ]


def test_the_report_says_what_to_do_and_counts():
    out = Console(record=True, width=100, file=io.StringIO())
    sections = {"machine": [ok("fine [here]")], "network": [warning("odd", "look"), problem("broken", "mend it")]}
    show_findings(sections, out)
    text = out.export_text()
    assert "fine [here]" in text and "→ mend it" in text
    assert verdict([*sections["machine"], *sections["network"]]) == "1 problem, 1 warning"
    assert has_problem(sections) and not has_problem({"network": [warning("odd", "look")]})
    assert verdict([ok("fine")]) == "everything is fine"
    assert verdict([warning("a", ""), warning("b", "")]) == "no problems, 2 warnings"
