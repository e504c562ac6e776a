"""Tests of `llmtrain launch`: the arguments and the environment of torchrun and its ranks, and the end of a run after a stop or the
loss of a node."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from torch.distributed import DistStoreError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from llmtrain.errors import DONE, FAILED, STOPPED_EARLY, RecipeError, TrainingError, UnavailableError, UserError
from llmtrain.launch import node_rendezvous, torchrun
from llmtrain.launch.attempts import Attempt, NodeExit
from llmtrain.launch.node_info import NodeInfo
from llmtrain.launch.nodes import Nodes
from llmtrain.launch.preflight import Preflight
from llmtrain.launch.torchrun import torchrun_arguments
from llmtrain.recipe_loader import load_recipe
from llmtrain.train.run_dir import RunDirectory
from tests.end_to_end.runs import RECIPE, ROOT
from tests.mother import session
from tests.unit import processes
from tests.unit.test_attempts import THREE


def test_torchrun_is_told_the_place_of_this_node():
    recipe = SimpleNamespace(run=SimpleNamespace(timeout_seconds=90.5))
    words = " ".join(torchrun_arguments(recipe, Attempt(1, Nodes(3, 2, "alpha", 5)), 8))
    # The launcher itself handles the signals that torchrun handles by default.
    assert words.startswith("--nnodes 3 --nproc-per-node 8 --signals-to-handle SIGVTALRM ")
    assert words.endswith(
        "--master-addr alpha --master-port 5 --node-rank 2 --log-dir /dev/null --rdzv-id attempt 1 --rdzv-conf timeout=91"
    )


def test_torchruns_own_variables_do_not_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubeflow sets these variables. Another rendezvous would wait for ranks elsewhere, and torchrun's restarts would undo a stop."""
    directory = RunDirectory(load_recipe(ROOT / RECIPE, [f"run.out_dir={tmp_path}", "run.name=a"]))
    for name in ("OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    given = {
        "RDZV_BACKEND": "c10d",
        "RDZV_ENDPOINT": "other:29400",
        "MAX_RESTARTS": "3",
        "STANDALONE": "1",
        "NO_PYTHON": "1",
    }
    for name, value in given.items():
        monkeypatch.setenv(f"PET_{name}", value)
    found: list[Namespace] = []
    monkeypatch.setattr("torch.distributed.run.run", found.append)
    arguments = torchrun.torchrun_arguments(directory.recipe, Attempt(0, THREE), 2)
    assert torchrun._run([*arguments, "train.py"], directory, THREE) == NodeExit(DONE)
    [command] = found
    assert (command.rdzv_backend, command.rdzv_endpoint, command.max_restarts) == ("static", "", 0)
    assert not command.standalone and not command.no_python and os.environ["PET_RDZV_BACKEND"] == "c10d"


def test_a_stop_before_training_ends_with_3_in_one_line():
    """The launcher is a process of its own, which gets the signal while it reads the recipe."""
    process = session().fork(processes.be_stopped_while_the_recipe_is_read, capture=True)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 3
    assert output == f"stopped by {signal.SIGUSR1.name} before training began; start the same command again\n"


@pytest.mark.fresh
def test_the_first_line_comes_before_torch_is_imported(tmp_path):
    """Importing torch takes seconds on a busy machine."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("import os; os.write(1, b'torch is imported\\n'); os._exit(0)")
    command = [sys.executable, "-m", "llmtrain", "launch", "recipes/edit_llama_stdlib.yaml", f"run.out_dir={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=280
    )
    first = "edit_llama_stdlib: edit, 300 steps of 4,096 tokens; loading torch\ntorch is imported\n"
    assert done.stdout.startswith(first), done.stdout + done.stderr


def test_a_node_that_refuses_the_recipe_first_meets_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    """The other nodes would wait for this node, and the cause may be its GPUs and not the recipe."""

    def refuse(kind: type[UserError]) -> Preflight:
        raise kind("there are 7 GPUs")

    assert torchrun._result_or_refusal(THREE, partial(refuse, RecipeError)) == (None, "there are 7 GPUs")
    assert capsys.readouterr().out == "node 2 refuses the recipe, and tells the other nodes: there are 7 GPUs\n"
    for nodes, kind in ((Nodes(), RecipeError), (THREE, UnavailableError)):  # the cause of the latter may pass
        with pytest.raises(kind, match=r"^there are 7 GPUs$"):
            torchrun._result_or_refusal(nodes, partial(refuse, kind))


def test_every_start_has_the_recipe_that_the_launcher_has_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user may edit the recipe's files during the run, for the next one."""
    path, read = tmp_path / "mine.yaml", []
    path.write_text(f"base: {ROOT / RECIPE}\nrun: {{name: first, out_dir: {tmp_path}}}\n")
    recipe = load_recipe(path, ["sync.outer=auto", "train.steps=40"])

    def run(arguments: list[str], *others: object) -> NodeExit:
        path.write_text(f"base: {ROOT / RECIPE}\nrun: {{name: second, out_dir: {tmp_path}}}\n")
        read.append(load_recipe(arguments[-1]))
        return NodeExit(FAILED if len(read) == 1 else DONE)

    link = SimpleNamespace(
        main_first=lambda *work: "",
        has_failed=lambda number: False,
        exchange_exits=lambda number, mine, loss: {0: mine},
    )
    monkeypatch.setattr(torchrun, "_run", run)
    monkeypatch.setattr(node_rendezvous, "connect_nodes", lambda *nodes: nullcontext(link))
    start = Preflight(processes=1, replicas=1, shards=1, reason="", memory=0)
    with torchrun._kept(recipe) as kept:
        assert torchrun._launch_ranks(recipe, kept, Nodes(), NodeInfo(1, 0, {}, ""), start, ["train"]) == DONE
    assert read == [recipe, recipe] and not kept.exists()


def test_without_a_temporary_folder_a_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    line = r"^no temporary folder can be written \(.*No such file.*\); set TMPDIR to one with some free space$"
    with pytest.raises(RecipeError, match=line), torchrun._kept(load_recipe(ROOT / RECIPE)):
        pass


EIGHT = Nodes(8, 0, "alpha", 5)
"""Eight nodes, which have eight ranks each."""


def test_the_nodes_that_are_left_train_with_the_batch_that_they_can_share(capsys: pytest.CaptureFixture[str]) -> None:
    """If the nodes that are left can share no batch, the run fails, and a warning at its start has said so. It is not an error
    of the recipe, because launchers start a failed run again on all nodes, but not a run with a wrong recipe."""

    def fewer(left: int, *keys: str) -> list[str]:
        start = Preflight(processes=64, replicas=8, shards=8, reason="", memory=0)
        attempt = Attempt(1, Nodes(left, 0, "alpha", 5), range(left))
        recipe = load_recipe(ROOT / "recipes/edit_1b.yaml", keys)
        with torchrun._kept(recipe) as path:
            return torchrun._fewer_replicas(recipe, path, start, EIGHT, attempt)

    assert fewer(8) == [] and fewer(4) == ["parallel.replicas=auto"]
    smaller = ["parallel.replicas=auto", "train.global_batch=896", "train.tokens=null", "train.steps=23841"]
    assert fewer(7) == smaller, "7 x 8 GPUs x a micro-batch of 4 = 224"
    torchrun._warn_of_lost_node(EIGHT, lambda attempt: fewer(attempt.nodes.count))
    torchrun._warn_of_lost_node(Nodes(), pytest.fail)
    assert capsys.readouterr().out == ""
    line = (
        "the run can't continue on 7 of 8 nodes: train.global_batch would be 896, and with data.packing=none it must stay, because "
        "the order of documents depends on it; start it again on all 8"
    )
    with pytest.raises(TrainingError, match=f"^{re.escape(line)}$"):
        fewer(7, "data.packing=none")
    torchrun._warn_of_lost_node(EIGHT, lambda attempt: fewer(attempt.nodes.count, "data.packing=none"))
    assert capsys.readouterr().out == f"warning: after the loss of a node, {line}\n"
    with pytest.raises(
        TrainingError, match=r"train.global_batch is 200, not a multiple of .* = 4 x 56 = 224; start it"
    ):
        fewer(7, "train.global_batch=200", "parallel.replicas=auto", "parallel.shards=1")


@pytest.mark.parametrize(("recipe_was_written", "code"), [(False, None), (True, STOPPED_EARLY)])
def test_a_signal_before_the_ranks_have_met_ends_like_one_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe_was_written: bool, code: int | None
) -> None:
    """Ranks that have met handle signals, and the summary says how they ended. It may come late from another node."""
    directory = RunDirectory(load_recipe(ROOT / RECIPE, [f"run.out_dir={tmp_path}", "run.name=a"]))

    def run(command: object) -> None:
        if recipe_was_written:
            directory.path.mkdir()
            (directory.path / "recipe.yaml").touch()
        raise SignalException("asked to stop", signal.SIGUSR1)

    def sleep(seconds: float) -> None:
        directory.write_summary({"stopped": "signal"})

    asked: list[Path] = []
    monkeypatch.setattr("torch.distributed.run.run", run)
    monkeypatch.setattr(torchrun, "revalidate", asked.append)
    monkeypatch.setattr(torchrun, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    arguments = torchrun.torchrun_arguments(directory.recipe, Attempt(0, THREE), 2)
    if code is None:
        with pytest.raises(torchrun.StopRequested, match=r"^stopped by SIGUSR1 before training began; start"):
            torchrun._run([*arguments, "train.py"], directory, THREE)
    else:
        assert torchrun._run([*arguments, "train.py"], directory, THREE) == NodeExit(code, by_signal=True)
    assert asked == [directory.path] * 2, "NFS remembers for a minute that there was no recipe"


def test_a_node_whose_torchrun_does_not_arrive_is_a_failure_of_this_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launchers then find out which node is lost, and may continue without it."""
    directory = RunDirectory(load_recipe(ROOT / RECIPE, [f"run.out_dir={tmp_path}", "run.name=a"]))
    absent = DistStoreError("Timed out after 6 seconds waiting for clients. 1/3 clients joined.")
    monkeypatch.setattr("torch.distributed.run.run", Mock(side_effect=absent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    arguments = torchrun.torchrun_arguments(directory.recipe, Attempt(0, THREE), 2)
    assert torchrun._run([*arguments, "train.py"], directory, THREE) == NodeExit(FAILED)
    assert capsys.readouterr().err == f"error: node {THREE.rank} could not start its ranks: {absent}\n"


@pytest.mark.parametrize(
    ("codes", "code"),
    [((120,), 1), ((255, -9), 1), ((-15, 1), 1), ((1, 2), 2), ((120, 3), 3), ((2,), 2)],
)
def test_a_code_that_is_none_of_ours_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: tuple[int, ...], code: int
) -> None:
    """Only failures are started again. Python ends with 120 if it can't write what it has printed."""
    directory = RunDirectory(load_recipe(ROOT / RECIPE, [f"run.out_dir={tmp_path}", "run.name=a"]))
    failures = {rank: ProcessFailure(rank, 1, exit_code, "none") for rank, exit_code in enumerate(codes)}
    monkeypatch.setattr("torch.distributed.run.run", Mock(side_effect=ChildFailedError("train", failures)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    arguments = torchrun.torchrun_arguments(directory.recipe, Attempt(0, THREE), 2)
    assert torchrun._run([*arguments, "train.py"], directory, THREE) == NodeExit(code)


def test_a_signal_while_the_summary_of_a_stopped_run_is_awaited_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node without rank 0 waits for the summary, up to half a minute."""
    directory = RunDirectory(load_recipe(ROOT / RECIPE, [f"run.out_dir={tmp_path}", "run.name=a"]))

    def run(command: object) -> None:
        directory.path.mkdir()
        (directory.path / "recipe.yaml").touch()
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("torch.distributed.run.run", run)
    asked_again = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(torchrun, "time", asked_again)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    arguments = torchrun.torchrun_arguments(directory.recipe, Attempt(0, THREE), 2)
    with (
        pytest.raises(torchrun.StopRequested, match=r"^stopped by SIGTERM between two attempts"),
        torchrun._stop_requests_raise("between two attempts"),
    ):
        torchrun._run([*arguments, "train.py"], directory, replace(THREE, rank=1))


def test_no_summary_is_awaited_after_a_second_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed ranks write no summary, and the other nodes would hear only after the wait that this node has failed."""
    directory = RunDirectory(load_recipe(ROOT / RECIPE, [f"run.out_dir={tmp_path}", "run.name=a"]))

    def run(command: object) -> None:
        directory.path.mkdir()
        (directory.path / "recipe.yaml").touch()
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("torch.distributed.run.run", run)
    monkeypatch.setattr(torchrun, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pytest.fail))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    arguments = torchrun.torchrun_arguments(directory.recipe, Attempt(0, THREE), 2)
    exited = torchrun._run([*arguments, "train.py"], directory, replace(THREE, rank=1))
    assert exited == NodeExit(FAILED, by_signal=True)


@pytest.mark.parametrize(
    ("message", "is_news"), [("Error waiting on exit barrier. Elapsed: %s seconds", False), ("failed", True)]
)
def test_torchruns_lines_about_nodes_that_end_later_are_no_news(message: str, is_news: bool) -> None:
    record = logging.LogRecord("torch", logging.ERROR, "api.py", 1, message, (), None)
    assert torchrun._filter_line(record) == is_news


def test_ranks_share_the_cores_that_the_launcher_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(load_recipe(ROOT / RECIPE, [f"run.out_dir={tmp_path}", "run.name=a"]))
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    monkeypatch.setattr(torchrun, "usable_cores", lambda: 12)
    found: list[str] = []
    monkeypatch.setattr("torch.distributed.run.run", lambda command: found.append(os.environ["OMP_NUM_THREADS"]))
    for ranks in (4, 24):
        monkeypatch.setenv("OMP_NUM_THREADS", "")  # so that monkeypatch also undoes what `_run` sets
        monkeypatch.delenv("OMP_NUM_THREADS")
        arguments = torchrun.torchrun_arguments(directory.recipe, Attempt(0, THREE), ranks)
        assert torchrun._run([*arguments, "train.py"], directory, THREE) == NodeExit(DONE)
    assert found == ["3", "1"]


def test_ranks_on_gpus_are_started_with_segments_that_expand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(load_recipe(ROOT / RECIPE, [f"run.out_dir={tmp_path}", "run.name=a"]))
    for name in ("OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "1")  # so that monkeypatch also undoes what `_run` sets
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    found: list[str | None] = []
    monkeypatch.setattr("torch.distributed.run.run", lambda command: found.append(os.environ.get("PYTORCH_ALLOC_CONF")))
    arguments = torchrun.torchrun_arguments(directory.recipe, Attempt(0, THREE), 2)
    assert torchrun._run([*arguments, "train.py"], directory, THREE) == NodeExit(DONE)
    assert found == ["expandable_segments:True"]
