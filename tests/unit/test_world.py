"""Ranks from the environment of torchrun, DeepSpeed's launcher and Slurm; the mesh that `auto` chooses."""

import os

import pytest

from llmtrain.config import ParallelSection
from llmtrain.errors import RecipeError
from llmtrain.parallel.world import World, meeting_point
from llmtrain.plan.mesh import choose_mesh


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    """Sets variables after removing those that launchers set."""

    def set_variables(**variables: str) -> None:
        for name in list(os.environ):
            if name.startswith(("SLURM_", "MASTER_")) or name in (
                "RANK",
                "WORLD_SIZE",
                "LOCAL_RANK",
                "LOCAL_WORLD_SIZE",
            ):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, World(0, 1, 0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, World(3, 8, 1, 2)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}, World(3, 8, 3, 8)),
        (SRUN, World(5, 8, 1, 4)),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **SRUN}, World(0, 2, 0, 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, World(0, 1, 0, 1)),
    ],
    ids=["nothing", "torchrun", "no local size", "srun", "torchrun inside Slurm", "a job of one task"],
)
def test_ranks_come_from_the_launcher(environment, variables, expected):
    environment(**variables)
    assert World.from_environment() == expected


@pytest.mark.parametrize("variables", [{"RANK": "8", "WORLD_SIZE": "8"}, {"RANK": "x", "WORLD_SIZE": "8"}])
def test_impossible_ranks_are_refused_in_one_line(environment, variables):
    environment(**variables)
    with pytest.raises(RecipeError, match=f"RANK={variables['RANK']}") as caught:
        World.from_environment()
    assert "\n" not in str(caught.value)


def test_the_meeting_point_is_given_or_made_from_the_slurm_job(environment):
    environment(MASTER_ADDR="10.0.0.1", MASTER_PORT="4711", SLURM_JOB_NODELIST="a,b")
    assert meeting_point() == ("10.0.0.1", "4711")
    environment(SLURM_JOB_NODELIST="a,b", SLURM_JOB_ID="12345")
    assert meeting_point() == ("a", str(15000 + 12345))
    environment(MASTER_ADDR="10.0.0.1")
    with pytest.raises(RecipeError, match="MASTER_PORT=None"):
        meeting_point()


def test_the_list_of_a_slurm_job_is_expanded_by_scontrol(environment, monkeypatch, tmp_path):
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$3" = "gpu[07-08]" ] && printf "gpu07\\ngpu08\\n"\n')
    (tmp_path / "scontrol").chmod(0o755)
    environment(SLURM_JOB_NODELIST="gpu[07-08]", SLURM_JOB_ID="1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert meeting_point() == ("gpu07", "15001")


@pytest.mark.parametrize(
    ("parallel", "world", "local", "smallest", "expected"),
    [
        ({"replicas": 2, "shard": 4}, 8, 8, 1, (2, 4)),
        ({"shard": 4}, 8, 8, 1, (2, 4)),
        ({"replicas": 4}, 8, 8, 1, (4, 2)),
        ({}, 64, 8, 1, (8, 8)),
        ({}, 8, 8, 1, (8, 1)),
        ({}, 8, 8, 3, (2, 4)),
        ({}, 8, 8, 99, (1, 8)),
        ({}, 1, 1, 1, (1, 1)),
    ],
)
def test_the_mesh_follows_recipe_nodes_and_memory(parallel, world, local, smallest, expected):
    *mesh, reason = choose_mesh(ParallelSection(**parallel), world, local, lambda shard: shard >= smallest)
    assert tuple(mesh) == expected and reason
