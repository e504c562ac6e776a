"""Tests of ranks from the environment of torchrun, DeepSpeed's launcher and Slurm, and of the mesh that `auto` chooses."""

import itertools
import os
from types import SimpleNamespace

import pytest
import torch

from llmtrain.config import ParallelSection, Recipe
from llmtrain.errors import BAD_USAGE, RecipeError, exit_with_status
from llmtrain.parallel.world import SHARE_GPU, World, master_endpoint, node_name
from llmtrain.plan import time_estimate
from llmtrain.plan.mesh_plan import choose_mesh


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    """Provide a function that removes the variables that launchers set, and then sets the given ones."""

    def set_variables(**variables: str) -> None:
        for name in list(os.environ):
            if name.startswith(("SLURM_", "MASTER_")) or name in (
                "RANK",
                "WORLD_SIZE",
                "LOCAL_RANK",
                "LOCAL_WORLD_SIZE",
                "LOCAL_SIZE",
            ):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, World(0, 1, 0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, World(3, 8, 1, 2)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}, World(3, 8, 3, 8)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4", "CROSS_RANK": "1"}, World(5, 8, 1, 4)),
        (SRUN, World(5, 8, 1, 4)),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **SRUN}, World(0, 2, 0, 1)),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, World(0, 1, 0, 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}, World(0, 1, 0, 1)),
        ({**SRUN, "SLURM_STEP_ID": "4294967290"}, World(0, 1, 0, 1)),
        ({**SRUN, "SLURM_NTASKS_PER_NODE": "1"}, World(5, 8, 1, 4)),
        (
            {
                **SRUN,
                "SLURM_STEP_TASKS_PER_NODE": "2,6",
                "SLURM_PROCID": "7",
                "SLURM_LOCALID": "5",
                "SLURM_NODEID": "1",
            },
            World(7, 8, 5, 6),
        ),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3(x2),2", "SLURM_NODEID": "2"}, World(5, 8, 1, 2)),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3(x2),2", "SLURM_NODEID": "1"}, World(5, 8, 1, 3)),
    ],
    ids=[
        "nothing",
        "torchrun",
        "no local size",
        "DeepSpeed's launcher",
        "srun",
        "torchrun inside Slurm",
        "a job of one task",
        "the shell of a job of many",
        "the interactive shell of a job of many",
        "a step with more tasks per node than the job asks for",
        "a second node with more tasks",
        "a last node with fewer tasks",
        "a node in between",
    ],
)
def test_ranks_come_from_the_launcher(environment, variables, expected):
    environment(**variables)
    assert World.from_environment() == expected


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"RANK": "8", "WORLD_SIZE": "8"}, "RANK=8, WORLD_SIZE=8"),
        ({"RANK": "x", "WORLD_SIZE": "8"}, "RANK=x, WORLD_SIZE=8"),
        ({"WORLD_SIZE": "2"}, "RANK=nothing, WORLD_SIZE=2"),
        ({"RANK": "0"}, "RANK=0, WORLD_SIZE=nothing"),
        ({**SRUN, "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "4(y2)"}, "SLURM_STEP_TASKS_PER_NODE=4(y2)"),
        ({**SRUN, "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}, "SLURM_STEP_TASKS_PER_NODE=4(x2)"),
    ],
)
def test_impossible_ranks_are_refused_in_one_line(environment, capsys, variables, named):
    environment(**variables)
    with pytest.raises(SystemExit) as ended:
        exit_with_status(World.from_environment)
    assert ended.value.code == BAD_USAGE
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: environment: ") and named in line


def test_the_meeting_point_is_given_or_made_from_the_slurm_job(environment):
    environment(MASTER_ADDR="10.0.0.1", MASTER_PORT="4711", SLURM_JOB_NODELIST="a,b")
    assert master_endpoint() == ("10.0.0.1", "4711")
    environment(SLURM_JOB_NODELIST="a,b", SLURM_JOB_ID="12345")
    assert master_endpoint() == ("a", str(15000 + 12345))
    environment(SLURM_JOB_NODELIST="a,b", SLURM_JOB_ID="12345", SLURM_STEP_NODELIST="a,b", SLURM_STEP_ID="0")
    assert master_endpoint() == ("a", str(15000 + 12345))
    environment(SLURM_JOB_NODELIST="a,b,c", SLURM_JOB_ID="12345", SLURM_STEP_NODELIST="b,c", SLURM_STEP_ID="1")
    assert master_endpoint() == ("b", str(15000 + 12345 + 1009)), "a step without the job's first node"
    for job, port in (("16999", 31999), ("17000", 15000), ("39999", 20999)):  # 32768 is the first ephemeral port
        environment(SLURM_JOB_NODELIST="a,b", SLURM_JOB_ID=job)
        assert master_endpoint() == ("a", str(port))
    environment(MASTER_ADDR="10.0.0.1")
    with pytest.raises(RecipeError, match="MASTER_PORT=None"):
        master_endpoint()
    environment(MASTER_ADDR="", MASTER_PORT="4711")
    with pytest.raises(RecipeError, match="MASTER_ADDR is empty"):
        master_endpoint()
    environment(MASTER_ADDR="a", MASTER_PORT="65536")
    with pytest.raises(
        RecipeError, match="MASTER_PORT='65536' in the environment is not a whole number from 1 to 65535"
    ):
        master_endpoint()


def test_the_list_of_a_slurm_job_is_expanded_by_scontrol(environment, monkeypatch, tmp_path):
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$3" = "gpu[07-08]" ] && printf "gpu07\\ngpu08\\n"\n')
    (tmp_path / "scontrol").chmod(0o755)
    environment(SLURM_JOB_NODELIST="gpu[07-08]", SLURM_JOB_ID="1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert master_endpoint() == ("gpu07", "15001")


def test_without_scontrol_one_line_asks_for_the_address(environment, monkeypatch, tmp_path):
    environment(SLURM_JOB_NODELIST="gpu[07-08]", SLURM_JOB_ID="1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RecipeError, match=r"first of gpu\[07-08\] .* set MASTER_ADDR"):
        master_endpoint()


def on(*sizes: int) -> list[str]:
    """Return the node of each rank, given the number of ranks on each node. Ranks are numbered node by node."""
    return [f"node{node}" for node, size in enumerate(sizes) for _ in range(size)]


@pytest.mark.parametrize(
    ("parallel", "nodes", "smallest", "expected"),
    [
        ({"replicas": 2, "shards": 4}, on(8), 1, (2, 4)),
        ({"shards": 4}, on(8), 1, (2, 4)),
        ({"replicas": 4}, on(8), 1, (4, 2)),
        ({}, on(*[8] * 8), 1, (8, 8)),
        ({}, on(8), 1, (8, 1)),
        ({}, on(8), 3, (2, 4)),
        ({}, on(8), 99, (1, 8)),
        ({}, on(1), 1, (1, 1)),
        ({"shards": 2}, on(4, 2), 1, (3, 2)),
        ({"shards": 1}, on(4, 3), 1, (7, 1)),
        ({"shards": 1}, ["a", "b", "a", "b"], 1, (4, 1)),
        ({"shards": 4, "shard_across_nodes": True}, on(2, 2), 1, (1, 4)),
        ({"shard_across_nodes": True}, on(8, 8, 8, 8), 1, (4, 8)),
        ({"shard_across_nodes": True}, on(8, 8, 8, 8), 9, (2, 16)),
        ({"shard_across_nodes": True}, on(8, 8, 8, 8), 99, (1, 32)),
        ({"replicas": 2, "shard_across_nodes": True}, on(8, 8, 8, 8), 1, (2, 16)),
        ({"replicas": 4, "shard_across_nodes": True}, on(8, 8), 1, (4, 4)),
        ({"replicas": 2, "shards": 12, "shard_across_nodes": True}, on(8, 8, 8), 1, (2, 12)),
    ],
)
def test_the_mesh_follows_recipe_nodes_and_memory(parallel, nodes, smallest, expected):
    *mesh, reason = choose_mesh(ParallelSection(**parallel), nodes, False, lambda shard: shard >= smallest)
    assert tuple(mesh) == expected and reason


@pytest.mark.parametrize(
    ("parallel", "ranks", "on_gpu", "expected"),
    [
        ({}, 4, False, (2, 2)),
        ({}, 4, True, (4, 1)),
        ({}, 1, False, (1, 1)),
        ({}, 8, False, (8, 1)),
        ({"replicas": 4}, 4, False, (4, 1)),
        ({"replicas": 4}, 8, False, (4, 2)),
        ({"shards": 1}, 2, False, (2, 1)),
        ({"shards": 3}, 6, True, (2, 3)),
    ],
)
def test_a_mesh_for_cpus_is_for_its_number_of_processes(parallel, ranks, on_gpu, expected):
    section = ParallelSection(on_cpu={"replicas": 2, "shards": 2}, **parallel)
    *mesh, reason = choose_mesh(section, on(ranks), on_gpu, lambda shard: True)
    assert tuple(mesh) == expected
    assert (reason == "no GPU: parallel.on_cpu") == (not on_gpu and 2 in mesh)


@pytest.mark.parametrize(
    ("parallel", "nodes", "message"),
    [
        (
            {"shards": 4},
            on(2, 2),
            "replica of ranks 0 to 3 would be sharded over 2 nodes .* parallel.shards=2 or a divisor",
        ),
        (
            {"replicas": 1},
            on(4, 4),
            "parallel.shards is 8, but there are 2 x 4 ranks .* parallel.shard_across_nodes=true",
        ),
        ({"shards": 3}, on(4, 2), "replica of ranks 3 to 5 .* parallel.shards=2"),
        ({"shards": 2}, ["a", "b", "a", "b"], "number the ranks node by node"),
        ({}, ["a", "b", "a", "b"], "number the ranks node by node"),
        ({}, on(4, 4, 2), "2 x 4 and 1 x 2 ranks .* start the same number on each, or give parallel.shards, at most 2"),
        (
            {"replicas": 2, "shard_across_nodes": True},
            on(8, 8, 8),
            "parallel.replicas is 2, but there are 3 x 8 ranks .* would belong to two replicas, .* parallel.shards=12, too",
        ),
    ],
)
def test_a_replica_over_several_nodes_is_refused(parallel, nodes, message):
    with pytest.raises(RecipeError, match=message) as refused:
        choose_mesh(ParallelSection(**parallel), nodes, False, lambda shard: True)
    assert "\n" not in str(refused.value)


def test_a_node_is_what_one_launcher_started_on_one_machine(environment, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "host7")
    names = []
    for variables in ({}, {"GROUP_RANK": "0"}, {"GROUP_RANK": "1", "SLURM_NODEID": "0"}, {"SLURM_NODEID": "3"}):
        environment(**variables)
        names.append(node_name())
        monkeypatch.delenv("GROUP_RANK", raising=False)
    assert names == ["host7:", "host7:0", "host7:1", "host7:3"]


def test_ranks_that_share_a_gpu_share_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv(SHARE_GPU, "1")
    on_cpu = SimpleNamespace(Generator=lambda device: torch.Generator(), randn=lambda *size, **_: torch.ones(size))
    monkeypatch.setattr(time_estimate, "torch", SimpleNamespace(**vars(on_cpu), cuda=torch.cuda, mm=torch.mm))
    monkeypatch.setattr(time_estimate.time, "perf_counter", itertools.count().__next__)
    monkeypatch.setitem(time_estimate.MATMUL_SIZE, "cuda", 8)
    recipe = Recipe(run={"name": "shared"})
    assert time_estimate.rate_here(recipe, 4) == time_estimate.rate_here(recipe, 1) / 4
