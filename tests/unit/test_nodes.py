"""Number of processes that a launcher starts, and the nodes that its environment describes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from llmtrain.config import ParallelSection
from llmtrain.errors import RecipeError
from llmtrain.launch.nodes import Nodes, check_thread_count, local_world_size

VARIABLES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES")
STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_ID": "41007"}
SECOND = {"SLURM_STEP_NODELIST": "beta,gamma", "SLURM_STEP_ID": "1"}
ON_CPU = {"on_cpu": {"replicas": 2, "shards": 2}}
JOB = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "alpha,beta"}


@pytest.mark.parametrize(
    ("gpus", "parallel", "nodes", "expected"),
    [
        (0, {"replicas": 2, "shards": 2}, 1, 4),
        (0, {}, 1, 1),
        (0, {"shards": 4}, 1, 4),
        (0, {"replicas": 2, "shards": 2}, 2, 2),
        (0, ON_CPU, 1, 4),
        (0, ON_CPU, 2, 2),
        (0, {"replicas": 3, **ON_CPU}, 1, 6),
        (8, {}, 1, 8),
        (8, ON_CPU, 1, 8),
        (8, {"shards": 4}, 1, 8),
        (8, {"replicas": 2, "shards": 2}, 1, 4),
        (8, {"replicas": 8, "shards": 8}, 8, 8),
        (1, {"replicas": 2, "shards": 2}, 1, 1),
        (0, {"replicas": 4, "in_process": True, **ON_CPU}, 1, 1),
        (8, {"replicas": 4, "in_process": True}, 1, 1),
    ],
)
def test_one_process_a_gpu_or_as_the_mesh_asks(monkeypatch, gpus, parallel, nodes, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert local_world_size(ParallelSection(**parallel), nodes) == expected


def test_gpus_that_the_driver_counts_but_cuda_can_not_use_start_no_processes(monkeypatch):
    """The driver may be too old for this torch."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert local_world_size(ParallelSection(**ON_CPU), 1) == 4


def test_more_processes_than_gpus_if_they_may_share(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LLMTRAIN_SHARE_GPU", "1")
    assert local_world_size(ParallelSection(replicas=2, shards=1), 1) == 2
    assert local_world_size(ParallelSection(), 1) == 1


@pytest.fixture
def nodes_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], Nodes]:
    """Provide a function that returns the nodes that the given environment variables describe."""

    def read(variables: dict[str, str]) -> Nodes:
        for name in (*VARIABLES, *STEP, *SECOND, *JOB):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return Nodes.from_environment()

    return read


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Nodes()),
        ({"NNODES": "1", **JOB}, Nodes()),
        ({"NNODES": "1", **STEP, **JOB, "SLURM_STEP_ID": "4294967290"}, Nodes()),
        ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "alpha", **STEP, **JOB}, Nodes(2, 0, "alpha", 29400)),
        (
            {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "alpha", **STEP, "SLURM_STEP_NUM_TASKS": "1"},
            Nodes(2, 0, "alpha", 29400),
        ),
        ({"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "alpha"}, Nodes(3, 2, "alpha", 29400)),
        ({"NNODES": "3", "NODE_RANK": "0", "MASTER_ADDR": "alpha", "MASTER_PORT": "5"}, Nodes(3, 0, "alpha", 5)),
        ({**STEP, **JOB}, Nodes(2, 1, "alpha", 22007)),
        ({**STEP, **JOB, "MASTER_ADDR": "gamma", "MASTER_PORT": "5"}, Nodes(2, 1, "gamma", 5)),
        ({**STEP, **JOB, **SECOND}, Nodes(2, 1, "beta", 23016, "1")),
        ({**STEP, **JOB, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}, Nodes()),
    ],
    ids=[
        "alone",
        "one of a job",
        "one in the shell of a job",
        "as many as tasks",
        "a step per node",
        "by hand",
        "by hand with a port",
        "slurm",
        "slurm with an address",
        "second step",
        "one task",
    ],
)
def test_nodes_come_from_the_known_variables_or_from_slurm(nodes_in, variables, expected):
    assert nodes_in(variables) == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NNODES": "two"}, "NNODES='two' in the environment is not a whole number of at least 1"),
        ({"NNODES": "0"}, "NNODES='0' in the environment is not a whole number of at least 1"),
        ({"NNODES": "-1"}, "NNODES='-1' in the environment is not a whole number of at least 1"),
        ({"NNODES": "2", "NODE_RANK": "-1", "MASTER_ADDR": "a"}, "NODE_RANK='-1' in the environment"),
        ({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": " "}, "NNODES=2 needs MASTER_ADDR in"),
        ({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a..b"}, "MASTER_ADDR=a..b is not a host name"),
        ({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": 64 * "a"}, "MASTER_ADDR=a+ is not a host name"),
        (
            {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "99999"},
            "MASTER_PORT='99999' in the environment is not a whole number from 1 to 65535",
        ),
        ({**STEP, **JOB, "MASTER_ADDR": "a", "MASTER_PORT": "0"}, "MASTER_PORT='0' in the environment"),
        ({"NNODES": "2"}, "NNODES=2 needs NODE_RANK and MASTER_ADDR"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "NNODES=2 needs MASTER_ADDR in"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK=2 is not one of the 2 nodes"),
        ({**STEP, **JOB, "SLURM_STEP_NUM_TASKS": "8"}, "started launch/train.sh 8 times on 2 nodes"),
        (
            {**STEP, **JOB, "NNODES": "1"},
            "NNODES=1 in the environment, but srun started launch/train.sh 2 times; unset",
        ),
        (
            {**STEP, **JOB, "NNODES": "3"},
            "NNODES=3 in the environment, but srun started launch/train.sh 2 times; unset",
        ),
        (JOB, "this Slurm job has 2 nodes, but srun did not start"),
        ({**STEP, **JOB, "SLURM_STEP_ID": "4294967290"}, "this Slurm job has 2 nodes, but srun did not start"),
    ],
)
def test_incomplete_variables_are_refused(nodes_in, variables, message):
    with pytest.raises(RecipeError, match=message):
        nodes_in(variables)


@pytest.mark.parametrize("text", ["abc", "", "0", "4,", "1.5"])
def test_numbers_of_threads_that_are_none_are_refused(monkeypatch, text):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    with pytest.raises(RecipeError, match=f"OMP_NUM_THREADS='{text}' in the environment is not a number of threads"):
        check_thread_count()
    monkeypatch.setenv("OMP_NUM_THREADS", "4, 2")
    check_thread_count()
