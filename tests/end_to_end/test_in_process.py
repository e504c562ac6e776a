"""Tests of replicas in one process, from the command line: they train as replicas in separate processes do."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.errors import DONE, STOPPED_EARLY
from llmtrain.sync.methods import METHODS
from tests.distributed.stored_runs import KEYS, STEPS
from tests.end_to_end.runs import Runs, forget_after, lines_of, summary
from tests.stored_runs import differences

MESH = ("parallel.replicas=2", "parallel.shards=1")
HERE = (*MESH, "parallel.in_process=true")
STOPPED_AT = 6
TIMED = ("a_edit", "wagma")
METHOD_OF_PARTS = (
    "sync.method=edit",
    "sync.schedule={kind: overlapped, steps: 2, fragments: 2}",
    "sync.period.every=6",
    "sync.wire={kind: int8, error_feedback: true}",
    "checkpoint.every=6",
)
"""Overrides for a method that, when stopped, has messages in flight, a penalty's statistics and rounding errors."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(autouse=True)
def all_over(runs: Runs) -> Iterator[None]:
    """Kill the runs that a failed test has left, some of which would never end."""
    yield
    runs.kill()


def train(runs: Runs, name: str, *overrides: str) -> Path:
    code, output = runs.run(name, *overrides)
    assert code == DONE, output
    return runs.path(name)


def differing(one: Path, other: Path) -> list[str]:
    """Return one line per difference between two runs, except those of `run.name` and `parallel.in_process`."""
    own = ("recipe/parallel/in_process ", "recipe/run/name ")
    return [line for line in differences(one, other, {}) if not any(name in line for name in own)]


@pytest.fixture(scope="module")
def apart(runs: Runs) -> Path:
    """Train a run of two processes, and return its folder."""
    return train(runs, "processes", *MESH, *METHOD_OF_PARTS)


def test_a_run_is_that_of_two_processes(runs: Runs, apart: Path) -> None:
    assert differing(apart, train(runs, "together", *HERE, *METHOD_OF_PARTS)) == []


@pytest.mark.parametrize(
    ("first", "second"), [(MESH, HERE), pytest.param(HERE, MESH, marks=pytest.mark.deep)], ids=["together", "apart"]
)
def test_replicas_continue_a_run_that_was_not_theirs(
    runs: Runs, apart: Path, first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    name = f"begun-{'together' if first == HERE else 'apart'}"
    if first == HERE:
        train(runs, name, *first, *METHOD_OF_PARTS)
    else:
        shutil.copytree(apart, runs.path(name))
        for state in runs.path(name).rglob("recipe.yaml"):
            state.write_text(state.read_text().replace("name: processes", f"name: {name}"))
    forget_after(runs.path(name), STOPPED_AT)
    assert differing(apart, train(runs, name, *second, *METHOD_OF_PARTS)) == []


@pytest.mark.deep
@pytest.mark.parametrize("method", [method for method in METHODS if method not in TIMED])
def test_every_method_is_that_of_two_processes(runs: Runs, method: str) -> None:
    keys = (*STEPS, f"sync.method={method}", *KEYS[method])
    apart = train(runs, f"{method}-processes", *MESH, *keys)
    assert differing(apart, train(runs, f"{method}-together", *HERE, *keys)) == []


CLOCK = "parallel.virtual_clock.step_seconds="
OUTER = "sync.outer={kind: nesterov, lr: 0.8, momentum: 0.85, rounds: {momentum_warmup: 0}}"
A_EDIT = (
    OUTER,
    "sync.method=a_edit",
    "sync.warmup_steps=2",
    "sync.period={kind: seconds, every: 4, min_steps: 0}",
    "train.steps=14",
)
EDIT = (OUTER, "sync.method=edit", "sync.warmup_steps=2", "sync.period.every=4", "train.steps=14")


@pytest.mark.deep
def test_rounds_of_seconds_of_even_replicas_are_rounds_of_steps(runs: Runs) -> None:
    """Losses are equal to the last bit. The rounds of steps have a slow replica, which only makes them take longer."""
    timed = summary(train(runs, "timed", *HERE, *A_EDIT, f"{CLOCK}[1, 1]"))
    counted = summary(train(runs, "counted", *HERE, *EDIT, f"{CLOCK}[1, 3]"))
    assert (timed["final_eval_loss"], timed["sync_count"]) == (counted["final_eval_loss"], counted["sync_count"])
    assert (timed["virtual_seconds"], counted["virtual_seconds"]) == (14, 42)


def test_a_slow_replica_takes_fewer_steps_and_a_continued_run_as_many(runs: Runs) -> None:
    """After two synchronous steps of 2 s, a round of 4 s has four steps of the fast replica and two of the slow one."""
    keys = (*HERE, *A_EDIT, "log.every=1", "checkpoint.every=1", f"{CLOCK}[1, 2]")
    alone = train(runs, "alone", *keys)
    assert summary(alone)["virtual_seconds"] == 2 * 2 + 12 / 3 * 4
    assert {line.get("perf/virtual_seconds") for line in lines_of(alone)} >= {4, 8, 12, 16, 20}
    continued = runs.path("continued")
    shutil.copytree(alone, continued)
    for state in continued.rglob("recipe.yaml"):
        state.write_text(state.read_text().replace("name: alone", "name: continued"))
    forget_after(continued, 8)
    assert differing(alone, train(runs, "continued", *keys)) == []


@pytest.mark.deep
def test_a_signal_within_a_round_of_seconds_changes_nothing(runs: Runs) -> None:
    """The run completes the round before it stops, so that the continued run equals the undisturbed one."""
    keys = (
        *HERE,
        *A_EDIT,
        "train.steps=200",
        "sync.period.every=20",
        "log.every=1",
        "checkpoint.every=1",
        f"{CLOCK}[1, 2]",
    )
    alone = train(runs, "left-alone", *keys)
    process = runs.start(runs.command("signaled", *keys))
    runs.wait_for("signaled", 17)
    process.send_signal(signal.SIGTERM)
    code, output = runs.end(process)
    assert code == STOPPED_EARLY, output
    assert summary(runs.path("signaled"))["steps"] < 200
    assert differing(alone, train(runs, "signaled", *keys)) == []


def test_groups_that_wait_for_nobody_train_by_the_clock(runs: Runs) -> None:
    mesh = ("parallel.replicas=4", "parallel.shards=1", "parallel.in_process=true", "train.micro_batch=1")
    sync = ("sync.method=wagma", "sync.warmup_steps=0", "sync.period.every=4", "train.steps=12", "log.every=1")
    code, output = runs.run("wagma", *mesh, *sync, f"{CLOCK}[1, 1, 1, 2]")
    assert code == DONE and "By the virtual clock, this took 24 s." in output, output
    path = runs.path("wagma")
    assert max(line.get("sync/late", 0) for line in lines_of(path)) == 3 * 3
    assert summary(path)["virtual_seconds"] == 24


def test_a_run_that_was_continued_without_its_clock_keeps_the_clocks_time(runs: Runs) -> None:
    keys = (*HERE, *EDIT, "checkpoint.every=2")
    for steps, clock in ((6, [f"{CLOCK}[1, 2]"]), (8, []), (10, [f"{CLOCK}[1, 2]"])):
        path = train(runs, "interrupted-clock", *keys, f"train.steps={steps}", *clock)
    assert summary(path)["virtual_seconds"] == 6 * 2 + 2 * 2


def test_a_signal_stops_all_replicas_with_a_checkpoint(runs: Runs) -> None:
    process = runs.start(runs.command("stopped", *HERE, "train.steps=100000", "checkpoint.every=4"))
    runs.wait_for("stopped", 4)
    process.send_signal(signal.SIGTERM)
    code, output = runs.end(process)
    assert code == STOPPED_EARLY, output
    assert "start the same command again to continue" in output
    stopped = summary(runs.path("stopped"))
    assert stopped["stopped"] == "signal" and stopped["replicas"] == 2
    assert lines_of(runs.path("stopped"))[-1]["step"] == stopped["steps"]


def test_a_disk_without_space_ends_all_replicas(runs: Runs) -> None:
    """A file in the place of the checkpoint's folder stands for the full disk."""
    path = runs.path("no-disk")
    (path / "checkpoints").mkdir(parents=True)
    (path / "checkpoints" / "step-00000003.tmp").write_text("")
    code, output = runs.run("no-disk", *HERE)
    assert code == 1, output
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "step-00000003 could not be written" in error and "start the same command again" in error
