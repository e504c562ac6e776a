"""Tests of environment variables with wrong values: each is named in one line, and none is ignored."""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.config import ParallelSection
from llmtrain.errors import UserError
from llmtrain.eval.evaluated_checkpoint import check_model_path
from llmtrain.launch.nodes import Nodes, check_thread_count, processes_per_node
from llmtrain.parallel import world
from llmtrain.parallel.world import World, may_share_gpu
from llmtrain.startup import seconds_since_command
from tests.fuzz.draws import problem_of
from tests.fuzz.kinds import VARIABLES
from tests.in_process import message_of, run_here

NODE = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a"}
RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SLURM = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2"}
JOB = {"SLURM_JOB_NODELIST": "a,b", "SLURM_JOB_ID": "7"}
STEP = {**JOB, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "0"}
NO_RANK = "do not describe one rank of several; start with llmtrain launch, torchrun or srun"
NO_NUMBER = "in the environment is not a whole number"


def of_processes() -> int:
    return processes_per_node(ParallelSection(), 1)


Row = tuple[Callable[[], object], dict[str, str], str]


def each(
    read: Callable[[], object], name: str, texts: tuple, pattern: str, others: dict[str, str] | None = None
) -> list[Row]:
    """Return a row for each value of a variable."""
    return [(read, {**(others or {}), name: text}, pattern) for text in texts]


WRONG_VARIABLES: list[Row] = [
    *each(Nodes.from_environment, "NNODES", ("two", "0", "-1", "1.5", "", "²", "1e3"), f"NNODES='.*' {NO_NUMBER}"),
    *each(Nodes.from_environment, "NODE_RANK", ("-1", "one", "0.0"), f"NODE_RANK='.*' {NO_NUMBER}", NODE),
    (Nodes.from_environment, NODE | {"NODE_RANK": "2"}, "NODE_RANK=2 is not one of the 2 nodes"),
    (Nodes.from_environment, NODE | {"NODE_RANK": ""}, "NNODES=2 needs NODE_RANK"),
    (Nodes.from_environment, NODE | {"MASTER_ADDR": " "}, "NNODES=2 needs MASTER_ADDR"),
    *each(Nodes.from_environment, "MASTER_PORT", ("0", "99999", "http", "-5", "29400.0"), f"MASTER_PORT=.* {NO_NUMBER} from 1 to", NODE),
    (Nodes.from_environment, {"SLURM_JOB_NUM_NODES": "2"}, "this Slurm job has 2 nodes, but srun did not start"),
    (Nodes.from_environment, {"SLURM_JOB_NUM_NODES": "many"}, f"SLURM_JOB_NUM_NODES='many' {NO_NUMBER}"),
    (Nodes.from_environment, STEP | {"SLURM_STEP_NUM_TASKS": "8"}, "started launch/train.sh 8 times on 2 nodes"),
    (Nodes.from_environment, STEP | {"SLURM_STEP_NUM_TASKS": "x"}, f"SLURM_STEP_NUM_TASKS='x' {NO_NUMBER}"),
    (Nodes.from_environment, STEP | {"SLURM_STEP_NUM_NODES": "x"}, f"SLURM_STEP_NUM_NODES='x' {NO_NUMBER}"),
    (Nodes.from_environment, STEP | {"SLURM_NODEID": "x"}, f"SLURM_NODEID='x' {NO_NUMBER}"),
    (Nodes.from_environment, STEP | {"SLURM_JOB_ID": "x"}, f"SLURM_JOB_ID='x' {NO_NUMBER}"),
    (Nodes.from_environment, STEP | {"SLURM_STEP_ID": "x"}, f"SLURM_STEP_ID='x' {NO_NUMBER}"),
    (Nodes.from_environment, STEP | {"SLURM_JOB_NODELIST": "a[1-2]"}, "scontrol could not be asked for the first of a.1-2"),
    *((World.from_environment, RANK | {name: "x"}, f"{name}=x.* {NO_RANK}") for name in RANK),
    *((World.from_environment, RANK | {name: "-1"}, f"{name}=-1.* {NO_RANK}") for name in RANK),
    (World.from_environment, RANK | {"RANK": "2"}, NO_RANK),
    (World.from_environment, RANK | {"LOCAL_WORLD_SIZE": "3"}, NO_RANK),
    (World.from_environment, {"WORLD_SIZE": "2"}, f"RANK=nothing.* {NO_RANK}"),
    (World.from_environment, {"RANK": "0"}, f"WORLD_SIZE=nothing.* {NO_RANK}"),
    *((World.from_environment, SLURM | {name: "x"}, f"x.* {NO_RANK}") for name in world.SLURM[:3]),
    (World.from_environment, SLURM | {"SLURM_STEP_TASKS_PER_NODE": "x"}, f"SLURM_STEP_TASKS_PER_NODE=x.* {NO_RANK}"),
    *((read, {name: "4"}, f"{name}=4 in the environment says that this process is one of several; .*or unset {name}")
      for name in world.OTHER_SIZES for read in (World.from_environment, Nodes.from_environment)),
    (world.master_endpoint, {}, "MASTER_ADDR=None, MASTER_PORT=None; give both"),
    (world.master_endpoint, {"MASTER_ADDR": "a"}, "MASTER_ADDR=a, MASTER_PORT=None; give both"),
    (world.master_endpoint, {"MASTER_ADDR": "", "MASTER_PORT": "1"}, "MASTER_ADDR is empty in the environment"),
    (world.master_endpoint, {"MASTER_ADDR": "a", "MASTER_PORT": "99999"}, f"MASTER_PORT='99999' {NO_NUMBER}"),
    *each(of_processes, "NPROC_PER_NODE", ("gpu", "-1", "2.0"), f"NPROC_PER_NODE='.*' {NO_NUMBER}"),
    *each(check_thread_count, "OMP_NUM_THREADS", ("0", "many", "", "4,", "²", "-2"), "is not a number of threads; unset it, or set 1"),
    *each(may_share_gpu, "LLMTRAIN_SHARE_GPU", ("yes", "true", "2"), f"LLMTRAIN_SHARE_GPU='.*' {NO_NUMBER} from 0 to 1"),
    *each(seconds_since_command, "LLMTRAIN_STARTED", ("today", "nan", "inf"), "LLMTRAIN_STARTED='.*' in the environment is not a time"),
    (lambda: check_model_path(Path(os.environ["RUN_HERE"]), 1), {"WORLD_SIZE": "many"}, f"WORLD_SIZE='many' {NO_NUMBER}"),
]  # fmt: skip


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Unset the variables that launchers set, and set RUN_HERE to the folder of a run."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "recipe.yaml").touch()
    monkeypatch.setenv("RUN_HERE", str(tmp_path))
    return monkeypatch


def identity(row: object) -> str | None:
    return ", ".join(f"{name}={value}" for name, value in row.items()) if isinstance(row, dict) else None


@pytest.mark.parametrize(("read", "variables", "pattern"), WRONG_VARIABLES, ids=identity)
def test_a_wrong_variable_ends_with_2_and_one_line(
    environment: pytest.MonkeyPatch, read: Callable[[], object], variables: dict[str, str], pattern: str
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):  # only the first rank of a host prints the error
        if variables.get(name) == "1":
            environment.setenv(name, "0")
    code, output = run_here(read)
    assert code == 2 and problem_of(code, output) is None, output
    assert re.search(pattern, message_of(output)), output


@pytest.mark.parametrize(
    "variables", [{"LOCAL_RANK": "1"}, {"SLURM_LOCALID": "1"}, {"RANK": "1", "WORLD_SIZE": "7"}], ids=identity
)
def test_a_process_that_no_launcher_started_is_never_silent(
    environment: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    code, output = run_here(["recipe", "keys", "optimm"])
    assert code == 2 and message_of(output).startswith("optimm is neither a section")


@pytest.mark.parametrize("variables", [RANK, SLURM], ids=["torchrun", "Slurm"])
def test_only_the_first_rank_of_a_host_speaks(environment: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    def fail() -> None:
        raise UserError("wrong")

    for name, value in variables.items():
        environment.setenv(name, value)
    assert run_here(fail) == (2, "")

    def fail_alone() -> None:
        error = UserError("wrong here")
        error.is_shared = False
        raise error

    assert run_here(fail_alone) == (2, "error: wrong here\n")
    environment.setenv("LOCAL_RANK" if "RANK" in variables else "SLURM_LOCALID", "0")
    assert run_here(fail) == (2, "error: wrong\n")


@pytest.mark.parametrize("answer", ["", OSError("no such program"), subprocess.TimeoutExpired("scontrol", 20)], ids=str)
def test_a_controller_of_slurm_that_does_not_answer_is_named(
    environment: pytest.MonkeyPatch, answer: str | Exception
) -> None:
    waits: list[float] = []

    def run(command: list[str], timeout: float = math.inf, **_: object) -> subprocess.CompletedProcess:
        waits.append(timeout)
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess(command, 0, answer)

    environment.setattr(world.subprocess, "run", run)
    environment.setenv("SLURM_JOB_NODELIST", "a[1-2]")
    code, output = run_here(world.master_endpoint)
    assert code == 2 and "rank 0's host is not known: scontrol could not be asked" in output
    assert waits == [world.SCONTROL_SECONDS]


def test_a_right_environment_is_accepted(environment: pytest.MonkeyPatch) -> None:
    for name, value in {**RANK, "LLMTRAIN_SHARE_GPU": "1", "OMP_NUM_THREADS": "4,2", "LLMTRAIN_STARTED": "1.5"}.items():
        environment.setenv(name, value)
    assert World.from_environment() == World(1, 2, 1, 2) and may_share_gpu() and seconds_since_command() > 0


def test_variables_of_other_launchers_are_right_beside_ours_and_for_one_process(
    environment: pytest.MonkeyPatch,
) -> None:
    for name in world.OTHER_SIZES:
        environment.setenv(name, "1")
    assert World.from_environment() == World(0, 1, 0, 1) and Nodes.from_environment() == Nodes()
    for name, value in {**RANK, **NODE, **dict.fromkeys(world.OTHER_SIZES, "2")}.items():
        environment.setenv(name, value)
    assert World.from_environment() == World(1, 2, 1, 2) and Nodes.from_environment() == Nodes(2, 1, "a", 29400)
