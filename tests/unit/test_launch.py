"""What launch/train.sh decides before it starts ranks: how many, on which nodes, and whether all nodes are there."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import DistNetworkError

from llmtrain.config import ParallelSection
from llmtrain.errors import DONE, DataError, RecipeError, TrainingError
from llmtrain.launch import node_rendezvous
from llmtrain.launch.attempts import Attempt, NodeExit
from llmtrain.launch.node_rendezvous import NodeRendezvous, rendezvous_nodes
from llmtrain.launch.nodes import Nodes, check_thread_count, local_world_size
from llmtrain.launch.torchrun import torchrun_arguments
from llmtrain.parallel.network import unused_port
from tests.mother import session
from tests.unit import processes

HERE = socket.gethostname()
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
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert local_world_size(ParallelSection(**parallel), nodes) == expected


def test_more_processes_than_gpus_if_they_may_share(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LLMTRAIN_SHARE_GPU", "1")
    assert local_world_size(ParallelSection(replicas=2, shards=1), 1) == 2
    assert local_world_size(ParallelSection(), 1) == 1


@pytest.fixture
def nodes_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], Nodes]:
    """The nodes that an environment with these variables describes."""

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
        (
            {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "99999"},
            "MASTER_PORT='99999' in the environment is not a whole number from 1 to 65535",
        ),
        ({**STEP, **JOB, "MASTER_ADDR": "a", "MASTER_PORT": "0"}, "MASTER_PORT='0' in the environment"),
        ({"NNODES": "2"}, "NNODES=2 needs NODE_RANK and MASTER_ADDR"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "NNODES=2 needs MASTER_ADDR in"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK=2 is not one of the 2 nodes"),
        ({**STEP, **JOB, "SLURM_STEP_NUM_TASKS": "8"}, "started launch/train.sh 8 times on 2 nodes"),
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


def test_torchrun_is_told_the_place_of_this_node():
    recipe = SimpleNamespace(run=SimpleNamespace(timeout_seconds=90.5))
    words = " ".join(torchrun_arguments(recipe, Attempt(1, Nodes(3, 2, "alpha", 5)), 8))
    assert words.startswith("--nnodes 3 --nproc-per-node 8 ") and "SIGUSR1" in words
    assert words.endswith(
        "--master-addr alpha --master-port 5 --node-rank 2 --log-dir /dev/null --rdzv-id attempt 1 --rdzv-conf timeout=91"
    )


class Meeting:
    """Launchers of several nodes, each in a thread of this process."""

    def __init__(self) -> None:
        self.port = unused_port()

    def hold(
        self,
        ranks: list[int],
        count: int,
        do: Callable[[NodeRendezvous], object],
        seconds: float = 20,
        counts=None,
        steps: Sequence[str] = (),
        processes: Sequence[int] = (),
    ) -> list[object]:
        """What `do` returned or raised for each of `ranks`, in order."""
        outcomes: list[object] = [None] * len(ranks)

        def attend(place: int) -> None:
            nodes = Nodes(
                (counts or {}).get(place, count), ranks[place], "127.0.0.1", self.port, *steps[place : place + 1]
            )
            try:
                with rendezvous_nodes(nodes, seconds, *processes[place : place + 1]) as rendezvous:
                    outcomes[place] = do(rendezvous)
            except Exception as error:
                outcomes[place] = error

        threads = [threading.Thread(target=attend, args=(place,), daemon=True) for place in range(len(ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        return outcomes


@pytest.fixture
def meeting() -> Meeting:
    return Meeting()


def test_node_0_prepares_before_the_others_and_all_wait_for_all(meeting: Meeting):
    order: list[int] = []

    def attend(rendezvous: NodeRendezvous) -> tuple[str, int]:
        rank = rendezvous.nodes.rank
        answer = rendezvous.main_first(lambda: order.append(rank) or "", lambda: order.append(rank))
        return answer, len(order)

    assert meeting.hold([2, 0, 1], 3, attend) == [("", 3)] * 3
    assert order[0] == 0 and sorted(order) == [0, 1, 2]


def test_two_steps_of_a_slurm_job_with_one_port_do_not_meet(meeting: Meeting):
    outcomes = meeting.hold([0, 1], 2, lambda call: None, seconds=3, steps=["0", "1"])
    assert all(isinstance(outcome, TrainingError) and " to come; here: " in str(outcome) for outcome in outcomes)


def test_a_run_that_node_0_finds_complete_is_complete_everywhere(meeting: Meeting):
    prepared: list[int] = []
    outcomes = meeting.hold([0, 1], 2, lambda call: call.main_first(lambda: "done", lambda: prepared.append(1)))
    assert outcomes == ["done", "done"] and not prepared


def test_a_node_that_never_comes_is_named_on_every_node_that_came(meeting: Meeting):
    outcomes = meeting.hold([0, 2], 4, lambda call: None, seconds=3)
    assert {type(outcome) for outcome in outcomes} == {TrainingError}
    for outcome in outcomes:
        assert f"waited 3 s for node 1, node 3 to come; here: node 0 on {HERE}, node 2 on {HERE}; start" in str(outcome)


def test_without_node_0_the_others_say_where_they_looked(meeting: Meeting):
    (outcome,) = meeting.hold([1], 2, lambda call: None, seconds=1)
    assert isinstance(outcome, TrainingError)
    assert f"node 1 on {HERE} could not reach node 0 at 127.0.0.1:{meeting.port} in 1 s: Connection ref" in str(outcome)


def test_a_node_that_fails_is_named_on_the_others(meeting: Meeting):
    def attend(rendezvous: NodeRendezvous) -> str:
        def fail() -> None:
            raise DataError("data.cache_dir: no space")

        return rendezvous.main_first(lambda: "", fail if rendezvous.nodes.rank == 1 else lambda: None)

    first, second, third = meeting.hold([0, 1, 2], 3, attend)
    assert isinstance(second, DataError)
    for outcome in (first, third):
        assert isinstance(outcome, TrainingError)
        assert str(outcome) == f"node 1 on {HERE} failed: data.cache_dir: no space"


def test_two_nodes_with_one_number_are_refused(meeting: Meeting, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(node_rendezvous, "BEAT_SECONDS", 0.1)
    outcomes = meeting.hold([0, 1, 1], 3, lambda call: None)
    assert [type(outcome) for outcome in outcomes].count(RecipeError) == 1
    assert all("NODE_RANK=1" in str(outcome) and "is taken by node 1" in str(outcome) for outcome in outcomes)


def test_a_node_that_waits_for_node_0_reports_once_why(meeting: Meeting, monkeypatch, capsys):
    monkeypatch.setattr(node_rendezvous, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(node_rendezvous, "POLL_SECONDS", 0.02)
    meeting.hold([1], 2, lambda call: None, seconds=2)
    where = f"node 1 tries to reach node 0 at 127.0.0.1:{meeting.port} (up to 2 s): Connection refused"
    assert capsys.readouterr().out.splitlines() == [where]


def test_nodes_that_count_differently_are_refused(meeting: Meeting):
    first, second = meeting.hold([0, 1], 2, lambda call: None, counts={1: 3})
    assert isinstance(second, RecipeError) and f"NNODES=3 on {HERE}, but 2 on node 0" in str(second)
    assert isinstance(first, TrainingError) and str(second) in str(first)


def test_nodes_that_start_unequal_numbers_of_processes_are_refused(meeting: Meeting):
    outcomes = meeting.hold([0, 1], 2, lambda call: None, processes=[4, 8])
    assert RecipeError in map(type, outcomes)
    says = f"node 0 on {HERE} starts 4, node 1 on {HERE} starts 8; set NPROC_PER_NODE=4 on all of them"
    assert all(says in str(outcome) for outcome in outcomes), outcomes


def test_a_launcher_too_many_does_not_end_a_run(meeting: Meeting, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(node_rendezvous, "BEAT_SECONDS", 0.1)

    def attend(call: NodeRendezvous) -> dict[int, NodeExit]:
        if call.nodes.rank == 0:
            with (
                pytest.raises(RecipeError, match=f"NODE_RANK=1 on {HERE} is taken by node 1"),
                rendezvous_nodes(Nodes(2, 1, "127.0.0.1", meeting.port), 5),
            ):
                pass
        return call.exchange_exits(0, NodeExit(DONE), False)

    assert meeting.hold([0, 1], 2, attend) == [{0: NodeExit(DONE), 1: NodeExit(DONE)}] * 2


def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("0.0.0.0", 0)) as taken:
        nodes = Nodes(2, 0, "127.0.0.1", taken.getsockname()[1])
        with (
            pytest.raises(RecipeError, match=r"can't use MASTER_ADDR=.* a port that is free there"),
            rendezvous_nodes(nodes, 5),
        ):
            pass


@pytest.mark.parametrize("rank", [0, 1])
def test_a_network_that_fails_at_the_start_may_work_later(monkeypatch: pytest.MonkeyPatch, rank: int):
    """Schedulers start again what ends with code 1, and nothing that ends with 2: a name may not be known yet."""

    def refuse(*_: object, **__: object) -> None:
        raise DistNetworkError(
            "The client socket has timed out after 3000ms while trying to connect to (alpha, 1).\nMore"
        )

    monkeypatch.setattr(node_rendezvous, "TCPStore", refuse)
    monkeypatch.setattr(node_rendezvous, "_wait_for_listener", lambda *_: None)
    with (
        pytest.raises(
            TrainingError,
            match=rf"^node {rank} can't use MASTER_ADDR=alpha MASTER_PORT=1 .* timed out .*\(alpha, 1\)\.; ",
        ),
        rendezvous_nodes(Nodes(2, rank, "alpha", 1), 5),
    ):
        pass


def test_a_stop_before_training_ends_with_3_in_one_line():
    """A process of its own: it gets the signal while its recipe is read."""
    process = session().fork(processes.be_stopped_while_the_recipe_is_read, capture=True)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3
    assert output == f"stopped by {signal.SIGUSR1.name} before training began; start the same command again\n"


@pytest.mark.fresh
def test_the_first_line_comes_before_torch_is_imported(tmp_path):
    """Importing it takes seconds on a busy machine."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("import os; os.write(1, b'torch is imported\\n'); os._exit(0)")
    command = [sys.executable, "-m", "llmtrain", "launch", "recipes/edit_llama_stdlib.yaml", f"run.out_dir={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=60
    )
    first = "edit_llama_stdlib: edit, 300 steps of 4,096 tokens; loading torch\ntorch is imported\n"
    assert done.stdout.startswith(first), done.stdout + done.stderr
