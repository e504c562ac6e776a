"""Tests of runs that are killed, stopped or broken from outside: what they leave, and to which losses they continue."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from llmtrain.errors import DONE
from tests.end_to_end.runs import (
    Runs,
    exact_lines,
    family_of,
    is_gone,
    lines_of,
    ranks_of,
    summary,
    wait_until,
)
from tests.mother import Process, run_llmtrain, session

TWO = ("parallel.replicas=2", "parallel.shards=1")
ENDLESS = (*TWO, "train.steps=100000")
SECONDS = 60.0
"""Timeout for all processes to end on a busy machine."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(tmp_path_factory.mktemp("runs"))
    made.reference(2, 1)  # the run that most tests compare with
    return made


@pytest.fixture(autouse=True)
def all_over(runs: Runs) -> Iterator[None]:
    """Kill the runs that a failed test has left, some of which would never end."""
    yield
    runs.kill()


def kill_all(launcher: Process | subprocess.Popen) -> None:
    """Kill a launcher, its rank server and its ranks with SIGKILL, as a power failure would."""
    for process in family_of(launcher):
        with contextlib.suppress(psutil.NoSuchProcess):  # the server ends with its launcher
            process.kill()
    launcher.communicate(timeout=SECONDS)


@pytest.mark.parametrize("shard", [1, pytest.param(2, marks=pytest.mark.deep)], ids="{} shards".format)
@pytest.mark.parametrize(
    "step",
    [pytest.param(4, id="in a round", marks=pytest.mark.deep), pytest.param(6, id="with a synchronization armed")],
)
def test_a_killed_run_continues_to_the_same_losses(runs: Runs, step: int, shard: int):
    name, keys = (
        f"killed{step}x{shard}",
        ("parallel.replicas=2", f"parallel.shards={shard}", f"checkpoint.every={step}"),
    )
    runs.path(name).mkdir(parents=True)
    (runs.path(name) / "summary.json").write_text('{"stopped": "signal"}')  # left by an earlier start
    process = runs.start_held(name, step + 1, *keys)
    runs.wait_for(name, step)  # the checkpoint is written in the background
    kill_all(process)
    assert not (runs.path(name) / "summary.json").exists()
    code, output = runs.run(name, *keys)
    [continued] = re.findall(r"continuing from .*/step-0*(\d+)\n", output)
    assert code == 0 and int(continued) == step, output
    assert runs.exact(name) == exact_lines(runs.reference(2, shard))


def test_a_stopped_run_writes_a_checkpoint_exits_with_3_and_continues_to_the_same_losses(runs: Runs):
    process = runs.start_held("stopped", 5, *TWO, "checkpoint.every=4")
    process.send_signal(signal.SIGTERM)
    code, output = runs.end(process)
    assert code == 3, output
    said = summary(runs.path("stopped"))
    assert said["stopped"] == "signal" and 5 < said["steps"] <= 7, "it should stop within two log lines"
    assert (runs.path("stopped") / f"checkpoints/step-{said['steps']:08d}/state.json").is_file()
    code, output = runs.run("stopped", *TWO, "checkpoint.every=4")
    assert code == 0 and f"step-{said['steps']:08d}" in output, output
    assert runs.exact("stopped") == exact_lines(runs.reference(2, 1))


A_EDIT = ("sync.method=a_edit", "sync.period={kind: seconds, every: 600, min_steps: 1}", "sync.warmup_steps=1")


@pytest.mark.deep
def test_a_round_of_ten_minutes_ends_with_the_steps_of_the_run(runs: Runs):
    code, output = runs.run("seconds", *TWO, *A_EDIT)
    assert code == 0, output
    said = summary(runs.path("seconds"))
    assert (said["steps"], said["sync_count"]) == (12, 1)
    assert said["tokens"] == 12 * 16 * 32


def test_a_round_of_ten_minutes_ends_when_one_rank_is_asked_to_stop(runs: Runs):
    """Nothing is logged within the round, so the other rank sees the request in the job's store."""
    process = runs.start(runs.command("asked", *ENDLESS, *A_EDIT))
    lines = runs.path("asked") / "metrics.jsonl"
    wait_until(lambda: lines.exists() and len(runs.lines("asked")) == 2, "no line of step 1", SECONDS)
    rank = ranks_of(process)[1]
    rank.send_signal(signal.SIGTERM)
    code, output = runs.end(process)
    assert code == 3, output
    said = summary(runs.path("asked"))
    assert said["stopped"] == "signal" and said["steps"] > 1
    assert (runs.path("asked") / f"checkpoints/step-{said['steps']:08d}/state.json").is_file()


def test_a_run_killed_after_its_last_checkpoint_only_writes_its_summary(runs: Runs):
    reference, path = runs.reference(2, 1), runs.path("ended")
    shutil.copytree(reference, path)
    recipe = path / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(f"name: {reference.name}", "name: ended"))
    (path / "summary.json").unlink()
    code, output = runs.run("ended", *TWO)
    assert code == 0, output
    assert lines_of(path) == lines_of(reference)
    ours, theirs = (said | {"name": ""} for said in (summary(path), summary(reference)))
    assert ours == theirs


def all_end(family: list[psutil.Process]) -> None:
    wait_until(lambda: all(map(is_gone, family)), "processes outlive their launcher", SECONDS)


def asked_of_all(launcher: Process | subprocess.Popen) -> None:
    """Send SIGUSR1 and then SIGTERM to every process of the job, as a scheduler does."""
    family = family_of(launcher)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # SIGUSR1 has ended it
                process.send_signal(number)


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda launcher: launcher.send_signal(signal.SIGINT), id="SIGINT", marks=pytest.mark.deep),
        pytest.param(lambda launcher: launcher.send_signal(signal.SIGUSR1), id="SIGUSR1", marks=pytest.mark.deep),
        pytest.param(asked_of_all, id="all processes"),
    ],
)
def test_a_request_to_stop_ends_in_a_checkpoint_and_exit_code_3(runs: Runs, request: pytest.FixtureRequest, ask):
    name = request.node.callspec.id.replace(" ", "-")
    process = runs.start(runs.command(name, *ENDLESS))
    runs.wait_for(name, 3)
    family = family_of(process)
    ask(process)
    code, output = runs.end(process)
    assert code == 3, output
    said = summary(runs.path(name))
    assert said["stopped"] == "signal"
    assert (runs.path(name) / "checkpoints/latest").read_text().strip() == f"step-{said['steps']:08d}"
    all_end(family)


def test_a_run_that_is_over_before_ranks_agree_to_stop_ends_at_once(runs: Runs):
    """Without a log line, ranks never agree to stop. After a signal, the launcher waits for ranks to end, and ranks
    wait for the launcher to take their results. Rank 1 is held until the signal, so that the run cannot end before
    it."""
    process = runs.start_held("over", 4, *TWO, "log.every=100", "checkpoint.every=null")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=SECONDS)  # far less than run.timeout_seconds
    assert process.returncode == DONE, output
    assert summary(runs.path("over"))["stopped"] == "done" and "Trained 12 steps" in output


def test_a_rank_that_dies_ends_the_run_with_an_error(runs: Runs):
    process = runs.start(
        runs.command("broken", *ENDLESS, "checkpoint.every=null")
    )  # with checkpoints, their writer might report the error
    metrics = runs.path("broken") / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and "train/loss" in metrics.read_text(), "no step")
    family, ranks = family_of(process), ranks_of(process)
    assert len(ranks) == 2
    ranks[-1].kill()
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, output
    assert ("error: rank" in output and "lost a peer" in output) or "a peer died" in output, output
    all_end(family)


def test_a_second_interrupt_ends_all_ranks_at_once(runs: Runs):
    """The next log line, at which ranks would agree to stop, is far away."""
    process = runs.start(runs.command("interrupted", *ENDLESS, "log.every=100000", "checkpoint.every=null"))
    metrics = runs.path("interrupted") / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and "train/loss" in metrics.read_text(), "no step")
    family = family_of(process)
    process.send_signal(signal.SIGINT)
    lines = [process.stdout.readline()]
    while "stopping within two log lines, with a checkpoint; Ctrl-C again" not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], "".join(lines)
    assert len(ranks_of(process)) == 2
    process.send_signal(signal.SIGINT)
    code, output = runs.end(process)
    assert code == 1 and "all ranks of this node are killed at once" in output, output
    all_end(family)
    said = "".join(lines) + output
    assert lines[0].startswith("interrupted: edit, 100,000 steps of 512 tokens") and "torch/distributed" not in said, (
        said
    )


def test_a_launcher_that_is_killed_leaves_no_process(runs: Runs):
    process = runs.start(runs.command("orphans", *ENDLESS))
    runs.wait_for("orphans", 3)
    family = family_of(process)
    assert len(ranks_of(process)) == 2
    process.kill()
    all_end(family)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == -signal.SIGKILL, output
    assert summary(runs.path("orphans"))["stopped"] == "signal", "ranks should stop with a checkpoint"


def spawn_ranks(*arguments: str) -> None:
    """Run `llmtrain ARGUMENTS` in this process, a fork of the mother, without a rank server, as on GPUs."""
    from llmtrain.launch import rank_server

    rank_server._can_fork = lambda: False
    run_llmtrain(*arguments)


@pytest.mark.deep
def test_ranks_that_are_spawned_train_the_same(runs: Runs):
    arguments = runs.command("spawned", *TWO)[2:]
    process = session().fork(spawn_ranks, "launch", *arguments, environment=runs.environment, capture=True)
    code, output = runs.end(process)
    assert code == 0, output
    assert runs.exact("spawned") == exact_lines(runs.reference(2, 1))
