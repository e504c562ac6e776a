"""Methods that don't keep step, or keep messages under way, trained from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.runs import Runs, exact

TOKENS = 16 * 32
"""Of one step of all replicas."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def summary(path: Path) -> dict:
    return json.loads((path / "summary.json").read_text())


def forget_after(path: Path, step: int) -> None:
    """As if the run had been killed after its checkpoint of `step`."""
    for checkpoint in (path / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    (path / "checkpoints" / "latest").write_text(f"step-{step:08d}\n")
    (path / "summary.json").unlink()


RESUMED = {
    "streaming_diloco": ["sync.schedule={steps: 2, fragments: 3}", "sync.period.every=6", "sync.wire.feedback=true"],
    "co2": ["sync.period.every=5"],
    "palsgd": ["sync.schedule=layerwise", "sync.pull.probability=0.4"],
}


@pytest.mark.parametrize("method", RESUMED)
def test_a_run_with_messages_under_way_continues_to_the_same_losses(runs: Runs, method: str):
    changes = [f"sync.method={method}", *RESUMED[method], "eval.sample_prompt=null", "log.tensorboard=false"]
    code, output = runs.run(method, *changes)
    assert code == 0, output
    whole = runs.lines(method)
    forget_after(runs.path(method), 12)
    code, output = runs.run(method, *changes)
    assert code == 0 and "step-00000012" in output, output
    assert [exact(line) for line in runs.lines(method)] == [exact(line) for line in whole]


def test_palsgd_reports_steps_and_gradients(runs: Runs):
    result = summary(runs.path("palsgd"))
    assert result["steps"] == 24 and 10 < result["gradient_steps"] < 24
    assert result["tokens"] == result["gradient_steps"] * TOKENS, "a pull reads no data"
    assert runs.lines("palsgd")[-1]["tokens"] == result["tokens"]


def test_a_edit_ends_on_the_tokens_of_all_replicas(runs: Runs):
    period = "sync.period={kind: seconds, every: 0.3, min_steps: 2}"
    changes = ["sync.method=a_edit", period, "eval.sample_prompt=null", "parallel.replicas=4", "parallel.shard=1"]
    code, output = runs.run("a_edit", *changes)
    assert code == 0, output
    result, lines = summary(runs.path("a_edit")), runs.lines("a_edit")
    assert result["stopped"] == "done" and result["tokens"] >= 24 * TOKENS
    assert result["steps"] == result["tokens"] // TOKENS
    assert result["gradient_steps"] * TOKENS == result["tokens"]
    assert result["sync_count"] > 1
    steps = [line["step"] for line in lines if "train/loss" in line]
    assert steps == sorted(set(steps)) and steps[-1] == result["steps"]


def test_wagma_trains_and_stops_its_thread(runs: Runs):
    changes = ["sync.method=wagma", "parallel.replicas=4", "parallel.shard=1", "eval.sample_prompt=null"]
    code, output = runs.run("wagma", *changes)
    assert code == 0, output
    first, *_, last = (line["eval/loss"] for line in runs.lines("wagma") if "eval/loss" in line)
    assert last < first - 0.3
    forget_after(runs.path("wagma"), 12)
    code, output = runs.run("wagma", *changes)
    assert code == 0 and "step-00000012" in output, output


def test_diloco_of_two_replicas_with_three_shards(runs: Runs):
    changes = ["sync.method=diloco", "parallel.shard=3", "train.global_batch=12", "train.steps=8"]
    code, output = runs.run("three_shards", *changes, "eval.sample_prompt=null")
    assert code == 0 and "2 replicas x 3 shards" in output, output
