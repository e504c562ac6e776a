"""Tests of complete runs on GPUs, from the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from llmtrain.errors import DONE, STOPPED_EARLY
from llmtrain.parallel.world import SHARE_GPU
from tests import mother
from tests.emulated_gpu.as_cuda import COUNT
from tests.end_to_end.runs import ROOT, Runs, exact

pytestmark = pytest.mark.deep
LONG = ("parallel.replicas=2", "parallel.shards=2", "train.steps=40", "eval.every=40", "sync.offload=true")


def finished(runs: Runs, name: str, *overrides: str) -> str:
    """Run a recipe, check that the run ends well, and return its output."""
    code, output = runs.run(name, *overrides)
    assert code == DONE, output
    return output


@pytest.fixture(scope="module")
def offloaded(gpu_runs: Runs) -> Runs:
    """Provide runs, of which `offloaded` has ended."""
    output = finished(gpu_runs, "offloaded", *LONG)
    assert "mesh: 2 replicas x 2 shards on cuda (as the recipe says)" in output
    return gpu_runs


def test_it_trains_and_shows_what_a_gpu_does(offloaded: Runs) -> None:
    lines = offloaded.lines("offloaded")
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert min(losses) < losses[0] - 0.5  # not the last ones, which rise with outer momentum
    for line in lines:
        if "train/loss" in line:
            assert line["perf/mfu"] > 0 and line["perf/reserved_memory_gib"] >= line["perf/peak_memory_gib"]


def test_an_interrupted_run_ends_with_the_same_bits(offloaded: Runs) -> None:
    """Training stands still while checkpoints are written. No anchor in them is ever on the GPU as a whole."""
    process = offloaded.start_held("interrupted", 7, *LONG, "checkpoint.background=false")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == STOPPED_EARLY, output
    assert "continuing from" in finished(offloaded, "interrupted", *LONG, "checkpoint.background=false")
    ours, theirs = ([exact(line) for line in offloaded.lines(name)] for name in ("interrupted", "offloaded"))
    assert ours == theirs


@pytest.mark.parametrize(
    "keys",
    [
        ("sync.method=wagma", "parallel.replicas=4", "parallel.shards=1"),
        ("parallel.engine=zero", "parallel.zero_stage=2", "parallel.precision=bf16", "parallel.shards=2"),
        ("parallel.engine=zero", "parallel.zero_stage=1", "parallel.zero_offload=true", "parallel.shards=2"),
        ("sync.method=streaming_diloco", "sync.schedule.steps=2", "sync.wire.kind=int4", "parallel.compile=true"),
    ],
    ids=["wagma", "ZeRO-2", "ZeRO-1", "streaming"],
)
def test_whatever_the_recipe_says(gpu_runs: Runs, request: pytest.FixtureRequest, keys: tuple[str, ...]) -> None:
    name = request.node.callspec.id
    finished(gpu_runs, name, *keys)
    losses = [line["train/loss"] for line in gpu_runs.lines(name) if "train/loss" in line]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "command", [("generate", "--prompt", "def "), ("export",), ("doctor",)], ids=lambda command: command[0]
)
def test_commands_that_take_a_gpu_if_there_is_one(offloaded: Runs, command: tuple[str, ...]) -> None:
    run = () if command[0] == "doctor" else (str(offloaded.path("offloaded")),)
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain", command[0], *run, *command[1:]],
        cwd=ROOT,
        env=offloaded.environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == DONE, done.stdout + done.stderr


def test_replicas_that_share_a_gpu(emulation: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """They use gloo, though the recipe leaves the backend open. Without the user's permission, the run is refused."""
    for shared in ("0", "1"):
        runs = Runs(tmp_path_factory.mktemp("one_gpu"), {**emulation, COUNT: "1", SHARE_GPU: shared})
        code, output = runs.run("shared", "parallel.replicas=2", "parallel.shards=1", "sync.offload=true")
        if shared == "0":
            assert code != DONE and "parallel.replicas x parallel.shards" in output, output
    assert code == DONE, output
    losses = [line["train/loss"] for line in runs.lines("shared") if "train/loss" in line]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("tests", "outcome"),
    [
        (
            (
                "tests/distributed/test_offload.py",
                "tests/distributed/test_layerwise_long.py::test_a_wait_left_out_is_seen",  # the rest of the file takes minutes
            ),
            "11 passed",
        ),
        (("tests/gpu",), "54 passed, 8 skipped"),
    ],
    ids=["elsewhere", "tests/gpu"],
)
def test_what_needs_a_real_gpu_passes_here_too(emulation: dict[str, str], tests: tuple[str, ...], outcome: str) -> None:
    environment = {**os.environ, **emulation}
    environment.pop(mother.ADDRESS, None)  # this session's mother process has no GPUs
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--gpu", *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    assert outcome in done.stdout
